"""Align a recording of any length with its text, by CTC segmentation.

recording -> log-probabilities and pauses -> aligned sentences -> their ends in pauses

Legend: U frames, V vocabulary, N sentences, P pauses.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.audio.segments import MARGIN_SECONDS, WINDOWS_PER_SECOND, Pauses
from sbkit.base.arrays import Float64s, LogProbs
from sbkit.base.errors import DataError
from sbkit.base.units import samples_to_seconds
from sbkit.decoding.long_alignment import AlignedUtterance, align_utterances
from sbkit.decoding.word_times import WordOffsets
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.tasks.asr.predict import Transcriber
from sbkit.tasks.vad.predict import VoiceDetector
from sbkit.text.languages import primary_language
from sbkit.text.verbalize import spell_numbers

PAUSE_TOLERANCE = 0.3  # seconds between the time of a token and the pause beside it
MIN_PAUSE_SECONDS = 0.1  # shorter ones are part of consonants


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


def run_model(
    transcriber: Transcriber,
    recording: Path,
    *,
    detector: VoiceDetector | None,
    on_seconds: Callable[[float], object],
) -> RecordingOutput:
    """Run the model on a recording, whose pauses the detector finds.

    on_seconds: called with the seconds of audio that the model has run on since its last call.
    """
    rate = transcriber.sample_rate
    pauses = Pauses(detector, rate)
    starts: list[npt.NDArray[np.floating]] = []
    windows: list[list[float]] = []
    seconds = 0.0
    with TemporaryFile() as file:
        for audio, output in transcriber.encode(recording):
            samples = audio.samples[: audio.next_start - audio.start]
            pauses.add(samples)
            first = samples_to_seconds(audio.start, rate)
            windows += [
                [first + window / WINDOWS_PER_SECOND for window in pause]
                for pause in pauses.within(samples, audio.start)
            ]
            file.write(np.asarray(output.log_probs, np.float32).tobytes())
            starts.append(
                output.start + transcriber.frame_seconds * np.arange(len(output.log_probs))
            )
            seconds = samples_to_seconds(audio.next_start, rate)
            on_seconds(samples_to_seconds(len(samples), rate))
        file.flush()
        times = np.concatenate(starts)
        if not len(times):
            raise DataError(f"{recording} is shorter than a frame of the model.")
        log_probs = np.memmap(file, np.float32, "r", shape=(len(times), output.log_probs.shape[1]))
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


class AlignedSentence(NamedTuple):
    """A sentence that has words; start and end in seconds. Without a score, nobody speaks it."""

    text: str
    start: float = 0.0
    end: float = 0.0
    score: float | None = None


def align(
    bundle: AsrBundle[Any], output: RecordingOutput, sentences: Sequence[str]
) -> list[AlignedSentence]:
    """Find the sentences of a text in a recording; those without words are left out."""
    spelled = [_to_tokens(bundle, " ".join(sentence.split())) for sentence in sentences]
    spelled = [(sentence, tokens) for sentence, tokens in spelled if tokens]
    tokenizer = bundle.tokenizer
    utterances = align_utterances(
        output.log_probs,
        [tokens for _, tokens in spelled],
        vocabulary=tokenizer.vocabulary,
        silent_ids=tokenizer.silent_ids,
    )
    frame_seconds = samples_to_seconds(bundle.model.samples_per_frame, bundle.config.sample_rate)
    spoken = [utterance for utterance in utterances if utterance is not None]
    spans = iter(_time(spoken, output, bundle.config.word_offsets, frame_seconds))
    aligned: list[AlignedSentence] = []
    for (text, _), utterance in zip(spelled, utterances, strict=True):
        if utterance is None:
            aligned.append(AlignedSentence(text))
        else:
            start, end = next(spans)
            aligned.append(AlignedSentence(text, start, end, utterance.score))
    return aligned


def _to_tokens(bundle: AsrBundle[Any], sentence: str) -> tuple[str, list[int]]:
    """Return a sentence and its tokens, with numbers in words if the model has no digits."""
    tokenizer = bundle.tokenizer
    tokens = tokenizer.encode(bundle.normalizer()(sentence))
    if tokenizer.vocabulary.unk in tokens and re.search(r"\d", sentence):
        sentence = spell_numbers(sentence, primary_language(bundle.config.language or "und"))
        tokens = tokenizer.encode(bundle.normalizer()(sentence))
    return sentence, tokens


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
