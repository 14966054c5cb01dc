"""The labels of voice activity detection: which windows of 20 ms of a clip are speech.

The column `speech` has the start and end of each span of speech, in seconds. A window is speech
unless its level is that of a pause or, if a recognizer aligns the transcript, no word is near:
breath and clicks do not count. Short pauses do.

Legend: S samples, W windows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbkit.audio.io import Samples
from sbkit.audio.segments import SHORT_PAUSE_SECONDS, WINDOWS_PER_SECOND, find_pauses
from sbkit.base.arrays import Bools
from sbkit.base.errors import DataError
from sbkit.base.messages import short_value
from sbkit.base.units import samples_to_seconds
from sbkit.data.columns import MAX_ROUNDING
from sbkit.text.recognized_word import Word

SPEECH = "speech"  # the column
WORD_MARGIN_SECONDS = 0.1  # around an aligned word
SPANS_ADVICE = (
    "Write the start and the end in seconds, not in milliseconds or samples: 0.24-1.52 1.80-2.10."
)


def speech_of(row: Mapping[str, Any], sample_rate: int) -> Bools:
    """Label the windows of a clip by its column `speech`, or else by its level: -> (W,)."""
    value = row.get(SPEECH)
    if isinstance(value, np.ndarray):  # the labels themselves
        return value
    samples = row["audio"]
    if value is None:
        return find_speech(samples, sample_rate)
    try:
        spans = parse_spans(value, samples_to_seconds(len(samples), sample_rate))
    except ValueError as error:
        raise DataError(
            f"`{SPEECH}` must have spans within the clip, but that of {row['id']} is "
            f"{short_value(value)}. {SPANS_ADVICE}"
        ) from error
    speech = np.zeros(len(samples) // (sample_rate // WINDOWS_PER_SECOND), np.bool_)
    for start, end in spans:
        speech[round(start * WINDOWS_PER_SECOND) : round(end * WINDOWS_PER_SECOND)] = True
    return speech


def find_speech(samples: Samples, sample_rate: int, words: Sequence[Word] | None = None) -> Bools:
    """Label the windows of clean audio as speech: (S,) -> (W,)."""
    window = sample_rate // WINDOWS_PER_SECOND
    speech = np.ones(len(samples) // window, np.bool_)
    for first, end in find_pauses(samples, window):
        speech[first:end] = False
    if words is not None:
        is_near_word = np.zeros_like(speech)
        for word in words:
            first = max(0, round((word.start - WORD_MARGIN_SECONDS) * WINDOWS_PER_SECOND))
            end = round((word.end + WORD_MARGIN_SECONDS) * WINDOWS_PER_SECOND)
            is_near_word[first:end] = True
        speech &= is_near_word
    spoken = np.flatnonzero(speech)
    lengths = np.diff(spoken)  # the windows of a pause, plus one
    is_bridged = (lengths > 1) & (lengths <= SHORT_PAUSE_SECONDS * WINDOWS_PER_SECOND)
    for index in np.flatnonzero(is_bridged):  # such as the closure of a consonant
        speech[spoken[index] : spoken[index + 1]] = True
    return speech


def parse_spans(value: str, seconds: float) -> list[tuple[float, float]]:
    """Return the start and the end of each span; raise ValueError if one is not in the clip."""
    pairs = (span.split("-") for span in value.split())
    spans = [(float(start), float(end)) for start, end in pairs]
    if not all(0 <= start <= end <= seconds + MAX_ROUNDING for start, end in spans):
        raise ValueError(f"{value} is not within {seconds} s")
    return spans
