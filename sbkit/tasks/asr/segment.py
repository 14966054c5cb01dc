"""`sbkit segment`: a long recording and its text become utterances that training takes.

The text may lack parts of the recording, and have parts that nobody speaks. A second recording with
the same --out is added to the table. The progress has every sentence, so another --min-score needs
no other alignment.
"""

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.base.errors import DataError
from sbkit.base.files import read_text_lines, require_writable, write_text_atomically
from sbkit.base.messages import plural
from sbkit.cli.arguments import Parser
from sbkit.cli.clip_table import OutputRow, open_clip_table, utterance_id

if TYPE_CHECKING:
    from sbkit.tasks.asr.alignment import AlignedSentence

TABLE_FILE, LEFT_OUT_FILE = "segments.csv", "left_out.tsv"
SEGMENT_COLUMNS = ("id", "path", "offset", "duration", "text", "score")
LEFT_OUT_COLUMNS = ("path", "offset", "score", "text")


def add_commands(parser: Parser) -> None:
    """Add `segment`."""
    help = "cut a long recording into utterances"
    groups = "runtime vad quiet import"
    add = parser.add_command("segment", segment, help, groups, opens_bundle=True)
    add("recording", metavar="RECORDING", type=Path, help="an audio file of any length")
    add("transcript", metavar="TRANSCRIPT", type=Path, help="its text or subtitles, in UTF-8")
    model = "a bundle or a run folder that recognizes the language"
    one = {"type": Path, "nargs": 1, "required": True}
    add("--model", dest="models", metavar="BUNDLE|RUN", **one, help=model)
    add("--out", metavar="DIR", type=Path, required=True, help="the folder of the table")
    lines = "each line or subtitle is an utterance (default: each sentence)"
    add("--lines", action="store_true", help=lines)
    score = "leave out utterances with a lower score (default: -3)"
    add("--min-score", metavar="LN_P", type=float, default=-3.0, help=score)


def segment(options: Namespace) -> None:
    """Add the utterances of a recording to the table of a folder."""
    from sbkit.decoding.word_times import GREEDY
    from sbkit.runtime.runtimes import load_in_thread, model_options
    from sbkit.tasks.asr.alignment import align, run_model
    from sbkit.tasks.asr.bundle import as_recognizer
    from sbkit.tasks.asr.predict import Transcriber
    from sbkit.tasks.asr.recordings import show_seconds
    from sbkit.tasks.asr.subtitles import read_cues
    from sbkit.tasks.vad.predict import open_detector
    from sbkit.text.transcripts import split_text

    lines = read_text_lines(options.transcript, subject="A transcript")
    lines = read_cues("\n".join(lines), options.transcript) or lines
    require_writable(options.out, option="--out")
    options.out.mkdir(parents=True, exist_ok=True)
    bundle = load_in_thread(options.bundle, decoder=GREEDY, **model_options(options))
    bundle = as_recognizer(bundle)
    detector = open_detector(options)
    settings = {name: getattr(options, name) for name in ("runtime", "precision", "vad")}
    recording = str(options.recording.parent.resolve() / options.recording.name)
    digest = hashlib.sha256("\n".join([str(options.lines), *lines]).encode()).hexdigest()
    with (
        Transcriber(bundle=bundle, times=False, detector=detector) as transcriber,
        open_clip_table(options.out / TABLE_FILE, {**bundle.digests, **settings}) as table,
    ):
        table.require_unchanged([recording])
        if digest not in {row["transcript"] for row in table.rows.get(recording, ())}:
            file = options.recording
            with show_seconds("listening", [file]) as on_seconds:
                output = run_model(transcriber, file, detector=detector, on_seconds=on_seconds)
            sentences = lines if options.lines else split_text("\n".join(lines), output.seconds)
            aligned = align(bundle, output, sentences)
            if not aligned:
                raise DataError(f"{options.transcript} has no words.")
            if all(sentence.score is None for sentence in aligned):
                raise DataError(
                    f"None of {plural(len(aligned), 'sentence')} of {options.transcript} is heard "
                    f"in {recording}."
                )
            rows = [{**_to_row(recording, sentence), "transcript": digest} for sentence in aligned]
            table.add(recording, rows, size=Path(recording).stat().st_size)
        rows = table.sorted_rows()
        spoken = [row for row in rows if row["score"] is not None]
        written = [row for row in spoken if row["score"] >= options.min_score]
        lines = ["\t".join(LEFT_OUT_COLUMNS)]
        for row in rows:
            if row["score"] is None or row["score"] < options.min_score:
                values = (row[name] for name in LEFT_OUT_COLUMNS)
                lines.append("\t".join("" if value is None else str(value) for value in values))
        write_text_atomically(options.out / LEFT_OUT_FILE, "\n".join(lines) + "\n")
        minutes = sum(row["duration"] for row in written) / 60
        summary = (
            f"{len(written)} of {plural(len(rows), 'utterance')} ({minutes:.1f} min) with a score "
            f"of at least {options.min_score:g}; {len(rows) - len(spoken)} are not heard, and "
            f"{len(spoken) - len(written)} have a lower score ({options.out / LEFT_OUT_FILE})"
        )
        table.write(SEGMENT_COLUMNS, written, summary)


def _to_row(recording: str, sentence: "AlignedSentence") -> OutputRow:
    row: OutputRow = {"path": recording, "offset": None, "text": sentence.text, "score": None}
    if sentence.score is not None:
        row |= {
            "id": utterance_id(recording, sentence.start),
            "offset": round(sentence.start, 3),
            "duration": round(sentence.end - sentence.start, 3),
            "score": round(sentence.score, 3),
        }
    return row
