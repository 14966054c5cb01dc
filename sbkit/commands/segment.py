"""`sbkit segment`: a long recording and its text become utterances that training takes.

text -> sentences -> tokens
recording -> log-probabilities and pauses -> aligned sentences -> their ends in pauses -> rows

The text may lack parts of the recording, and have parts that nobody speaks. A second recording with
the same --out is added to the table. The progress has every sentence, so another --min-score needs
no other alignment.

Legend: U frames, V vocabulary, N sentences, P pauses.
"""

import hashlib
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.audio.levels import WINDOWS_PER_SECOND
from sbkit.base.arrays import Float64s, LogProbs
from sbkit.base.errors import DataError
from sbkit.base.files import read_text_lines, require_writable, write_text_atomically
from sbkit.base.messages import plural
from sbkit.base.units import samples_to_seconds
from sbkit.bundle.bundle import Bundle
from sbkit.commands.clip_table import Row, open_clip_table
from sbkit.commands.pseudo_labels import MARGIN_SECONDS, utterance_id
from sbkit.commands.transcribe import open_detector, show_seconds
from sbkit.decoding.segmentation import AlignedUtterance, segment
from sbkit.decoding.words import GREEDY, WordOffsets
from sbkit.runtime.runtimes import model_options
from sbkit.runtime.segments import Pauses
from sbkit.runtime.transcriber import Transcriber, open_recognizer
from sbkit.text.languages import primary_language
from sbkit.text.verbalize import spell_numbers

TABLE_FILE, LEFT_OUT_FILE = "segments.csv", "left_out.tsv"
COLUMNS = ("id", "path", "offset", "duration", "text", "score")
MAX_TEXT_BYTES = 1 << 26
MAX_SENTENCE_SECONDS = 20.0  # a longer sentence is split, at the average speed of the recording
# Limits of the longest sentence: a text of more recordings looks fast, one of a part looks slow.
MIN_LETTERS, MAX_LETTERS = 40, 300
PAUSE_TOLERANCE = 0.3  # seconds between the time of a token and the pause beside it
MIN_PAUSE_SECONDS = 0.1  # shorter ones are part of consonants
_CLOSING = "\"'\xbb\u201d\u2019)\\]\u300d\u300f"  # quotes and brackets
# Sentences of Chinese and Japanese end without a space, and those of Indic languages with a danda.
_SENTENCE_END = re.compile(
    rf"(?:[.!?\u2026\u0964\u061f\u06d4\u0589\u1362]+[{_CLOSING}]*(?=\s)"
    r"|[\u3002\uff01\uff1f]+[\u201d\u300d\u300f]*)\s*"
)
_ABBREVIATION = re.compile(r"\b(?:[^\W\d_]|[A-Z][a-z]{1,2})\.\s*$")  # J. Mr. St.
_CLAUSE_ENDS = (
    re.compile(r"[,;:\u2014\u3001\uff0c\uff1b\u061b\u060c]\s*"),
    re.compile(r"\s+"),
    re.compile(""),
)


def segment_recording(options: Namespace) -> int:
    """Add the utterances of a recording to the table of a folder; return the exit code.

    Raises SbkitError if the recording, the text or the model cannot be used, or do not fit.
    """
    lines = read_text_lines(options.transcript, max_bytes=MAX_TEXT_BYTES, subject="A transcript")
    require_writable(options.out, option="--out")
    options.out.mkdir(parents=True, exist_ok=True)
    bundle = open_recognizer(options.bundle, decoder=GREEDY, **model_options(options))
    settings = {name: getattr(options, name) for name in ("runtime", "precision", "vad")}
    recording = str(options.recording.parent.resolve() / options.recording.name)
    digest = hashlib.sha256("\n".join([str(options.lines), *lines]).encode()).hexdigest()
    with (
        Transcriber(bundle=bundle, times=False, detector=open_detector(options)) as transcriber,
        open_clip_table(
            options.out / TABLE_FILE, {**(bundle.config.provenance or {}), **settings}
        ) as table,
    ):
        table.require_unchanged([recording])
        if digest not in {row["transcript"] for row in table.rows.get(recording, ())}:
            output = _run_model(transcriber, bundle, options)
            sentences = lines if options.lines else split_text("\n".join(lines), output.seconds)
            rows = _align(bundle, output, sentences, recording)
            if not rows:
                raise DataError(
                    f"{options.transcript} has no words. Write the text of the recording into it."
                )
            if all(row["score"] is None for row in rows):
                raise DataError(
                    f"None of {plural(len(rows), 'sentence')} of {options.transcript} is heard in "
                    f"{recording}. Check that they belong together, and the model's language."
                )
            table.add_file(recording, [{**row, "transcript": digest} for row in rows])
        rows = table.sorted_rows()
        spoken = [row for row in rows if row["score"] is not None]
        written = [row for row in spoken if row["score"] >= options.min_score]
        _write_left_out(options.out / LEFT_OUT_FILE, rows, options.min_score)
        minutes = sum(row["duration"] for row in written) / 60
        summary = (
            f"{len(written)} of {plural(len(rows), 'utterance')} ({minutes:.1f} min) with a score "
            f"of at least {options.min_score:g}; {len(rows) - len(spoken)} are not heard, and "
            f"{len(spoken) - len(written)} have a lower score ({options.out / LEFT_OUT_FILE})"
        )
        table.write(COLUMNS, written, summary)
    return 0


def _write_left_out(file: Path, rows: Sequence[Row], min_score: float) -> None:
    lines = ["\t".join(("path", "offset", "score", "text"))]
    for row in rows:
        if row["score"] is None or row["score"] < min_score:
            values = (row[name] for name in ("path", "offset", "score", "text"))
            lines.append("\t".join("" if value is None else str(value) for value in values))
    write_text_atomically(file, "\n".join(lines) + "\n")


# ---- the recording


class RecordingOutput(NamedTuple):
    """The output of the model for a recording, and the recording's pauses.

    log_probs: (U, V), in a temporary file.
    starts: of the frames, in seconds, (U,).
    pauses: their starts and ends in seconds, (P, 2).
    """

    log_probs: LogProbs
    starts: Float64s
    pauses: Float64s
    seconds: float


def _run_model(transcriber: Transcriber, bundle: Bundle, options: Namespace) -> RecordingOutput:
    """Run the model on a recording of any length; raises SbkitError if it cannot be read."""
    rate = bundle.config.sample_rate
    frame_seconds = samples_to_seconds(bundle.model.samples_per_frame, rate)
    pauses = Pauses(open_detector(options), rate)
    starts: list[npt.NDArray[np.floating]] = []
    windows: list[list[float]] = []
    seconds = 0.0
    with (
        TemporaryFile() as file,
        show_seconds("listening", [options.recording], quiet=options.quiet) as on_seconds,
    ):
        for audio, segment_output in transcriber.encode(options.recording):
            samples = audio.samples[: audio.next_start - audio.start]
            pauses.add(samples)
            first = samples_to_seconds(audio.start, rate)
            windows += [
                [first + window / WINDOWS_PER_SECOND for window in pause]
                for pause in pauses.within(samples, audio.start)
            ]
            file.write(np.asarray(segment_output.log_probs, np.float32).tobytes())
            starts.append(
                segment_output.start + frame_seconds * np.arange(len(segment_output.log_probs))
            )
            seconds = samples_to_seconds(audio.next_start, rate)
            on_seconds(samples_to_seconds(len(samples), rate))
        file.flush()
        times = np.concatenate(starts)
        if not len(times):
            raise DataError(f"{options.recording} is shorter than a frame of the model.")
        log_probs = np.memmap(
            file, np.float32, "r", shape=(len(times), segment_output.log_probs.shape[1])
        )
    return RecordingOutput(log_probs, times, _join_pauses(windows), seconds)


def _join_pauses(pauses: Sequence[Sequence[float]]) -> Float64s:
    """Join pauses that meet at the end of a segment, and leave out short ones: -> (P, 2)."""
    joined: list[list[float]] = []
    for start, end in pauses:
        if joined and start - joined[-1][1] < 0.5 / WINDOWS_PER_SECOND:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    long_pauses = [pause for pause in joined if pause[1] - pause[0] >= MIN_PAUSE_SECONDS]
    return np.array(long_pauses, np.float64).reshape(-1, 2)


# ---- the text


def split_text(text: str, seconds: float) -> list[str]:
    r"""Split a text that takes ``seconds`` to speak into sentences, and long ones into parts.

    An empty line ends a sentence; other line ends do not.

    >>> split_text("Mr. Wu came\nhome. It rained.", 4)
    ['Mr. Wu came home.', 'It rained.']
    """
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    speed = sum(map(len, paragraphs)) / max(seconds, 1.0)
    max_letters = max(MIN_LETTERS, min(MAX_LETTERS, round(speed * MAX_SENTENCE_SECONDS)))
    sentences: list[str] = []
    for paragraph in paragraphs:
        start = 0
        for mark in _SENTENCE_END.finditer(paragraph):
            sentence = paragraph[start : mark.end()]
            if not _ABBREVIATION.search(sentence):
                sentences.append(sentence)
                start = mark.end()
        sentences.append(paragraph[start:])
    return [part for sentence in sentences for part in _split_long(sentence.strip(), max_letters)]


def _split_long(sentence: str, max_letters: int) -> list[str]:
    """Split a sentence at the comma, else the space, in its middle, until no part is too long."""
    if len(sentence) <= max_letters:
        return [sentence] if sentence else []
    quarter = len(sentence) // 4
    for pattern in _CLAUSE_ENDS:
        cuts = [match.end() for match in pattern.finditer(sentence, quarter, 3 * quarter)]
        if cuts:
            break
    middle = min(cuts, key=lambda cut: abs(cut - len(sentence) / 2))
    halves = (sentence[:middle].strip(), sentence[middle:].strip())
    return [part for half in halves for part in _split_long(half, max_letters)]


def _to_tokens(bundle: Bundle, sentence: str) -> tuple[str, list[int]]:
    """Return a sentence and its tokens, with numbers in words if the model has no digits."""
    tokenizer = bundle.tokenizer
    tokens = tokenizer.encode(bundle.normalizer()(sentence))
    if tokenizer.vocabulary.unk in tokens and re.search(r"\d", sentence):
        sentence = spell_numbers(sentence, primary_language(bundle.config.language or "und"))
        tokens = tokenizer.encode(bundle.normalizer()(sentence))
    return sentence, tokens


# ---- their alignment


def _align(
    bundle: Bundle, output: RecordingOutput, sentences: Sequence[str], recording: str
) -> list[Row]:
    """Return a row for each sentence that has words; without a score for those not spoken."""
    spelled = [_to_tokens(bundle, " ".join(sentence.split())) for sentence in sentences]
    spelled = [(sentence, tokens) for sentence, tokens in spelled if tokens]
    tokenizer = bundle.tokenizer
    aligned = segment(
        output.log_probs,
        [tokens for _, tokens in spelled],
        vocabulary=tokenizer.vocabulary,
        silent=tokenizer.silent,
    )
    frame_seconds = samples_to_seconds(bundle.model.samples_per_frame, bundle.config.sample_rate)
    spoken = [utterance for utterance in aligned if utterance is not None]
    spans = iter(_time(spoken, output, bundle.config.word_offsets, frame_seconds))
    rows: list[Row] = []
    for (sentence, _), utterance in zip(spelled, aligned, strict=True):
        row: Row = {"path": recording, "offset": None, "text": sentence, "score": None}
        if utterance is not None:
            start, end = next(spans)
            row |= {
                "id": utterance_id(recording, start),
                "offset": round(start, 3),
                "duration": round(end - start, 3),
                "score": round(utterance.score, 3),
            }
        rows.append(row)
    return rows


def _time(
    utterances: Sequence[AlignedUtterance],
    output: RecordingOutput,
    offsets: WordOffsets,
    frame_seconds: float,
) -> list[list[float]]:
    """Return the start and the end of utterances in seconds, in the pauses around them: N pairs."""
    if not utterances:
        return []
    first = output.starts[[utterance.first for utterance in utterances]]
    end = output.starts[[utterance.end - 1 for utterance in utterances]] + frame_seconds
    spans = frame_seconds * offsets.extend(first / frame_seconds, end / frame_seconds)
    spans = spans.clip(0, output.seconds)
    spoken = spans.copy()
    for span in spans:
        earliest, latest = span - PAUSE_TOLERANCE, span + PAUSE_TOLERANCE
        middle = span.mean()  # or a pause after a short word would be taken for that before it
        before = _longest_pause(output.pauses, 1, earliest[0], min(latest[0], middle))
        after = _longest_pause(output.pauses, 0, max(earliest[1], middle), latest[1])
        if before is not None:
            span[0] = max(before.mean(), before[1] - MARGIN_SECONDS)
        if after is not None:
            span[1] = min(after.mean(), after[0] + MARGIN_SECONDS)
    overlaps = spans[1:, 0] < spans[:-1, 1]
    spans[1:, 0][overlaps] = spoken[1:, 0][overlaps]
    spans[:-1, 1][overlaps] = spoken[:-1, 1][overlaps]
    times: list[list[float]] = spans.tolist()
    return times


def _longest_pause(pauses: Float64s, edge: int, low: float, high: float) -> Float64s | None:
    """Return the longest pause whose start (0) or end (1) is from one time to another."""
    first, end = np.searchsorted(pauses[:, edge], [low, high])
    near = pauses[first:end]
    return near[np.ptp(near, axis=1).argmax()] if len(near) else None
