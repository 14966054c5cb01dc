"""Label the speech of clean clips: a column `speech` with the times of each span, in seconds.

A window of 20 ms is speech if its level is no pause's and, if a recognizer aligns the transcript,
it is near an aligned word, so that breath and clicks are no speech. Short pauses are speech.

Legend: S samples, W windows of 20 ms.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from recipes.prepare import prepare_audio, prepare_transcripts, with_column
from sbkit.audio.io import Samples
from sbkit.audio.levels import SHORT_PAUSE_SECONDS, WINDOWS_PER_SECOND, find_pauses
from sbkit.base.checksums import listed_checksums
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.data.shard import Row, read_rows
from sbkit.data.splits import Splits
from sbkit.export.export import as_bundle
from sbkit.runtime.torch_model import load_bundle
from sbkit.text.word import Word

SPEECH = "speech"  # the column
WORD_MARGIN_SECONDS = 0.1  # around an aligned word

Windows = npt.NDArray[np.bool_]


def prepare_speech(knobs: Mapping[str, Any]) -> Splits:
    """Prepare audio; with a `recognizer`, label each clip that the corpus itself does not label.

    Raises:
        BundleError: `recognizer` is no speech recognizer.
    """
    if knobs["recognizer"] is None:
        return prepare_audio(knobs)
    with as_bundle(Path(knobs["recognizer"])) as folder:
        recognizer, weights = load_bundle(folder), listed_checksums(folder)[WEIGHTS_FILE]
    recognizer.task.require_prediction("text", command="transcribe")
    splits, rate = prepare_transcripts(knobs), knobs["sample_rate"]
    align = partial(_align, rate=rate, recognizer=recognizer)
    return with_column(splits, SPEECH, align, identity=[rate, weights])


def _align(split: Dataset, rate: int, recognizer: Bundle) -> Iterator[str]:
    """Yield the value of the column for each row."""
    for row in read_rows(split, range(len(split))):
        (words,) = recognizer.align([row["audio"]], [row["text"]])
        speech = np.pad(find_speech(row["audio"], rate, words).astype(np.int8), 1)
        edges = np.flatnonzero(np.diff(speech)).reshape(-1, 2) / WINDOWS_PER_SECOND
        yield " ".join(f"{start:.2f}-{end:.2f}" for start, end in edges)


def speech_of(row: Row, sample_rate: int) -> Windows:
    """Label the windows of a clip as speech, by its column or by its level: -> (W,)."""
    if SPEECH not in row:
        return find_speech(row["audio"], sample_rate)
    return read_speech(row[SPEECH], len(row["audio"]) // (sample_rate // WINDOWS_PER_SECOND))


def find_speech(samples: Samples, sample_rate: int, words: Sequence[Word] | None = None) -> Windows:
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
    return bridge_pauses(speech)


def bridge_pauses(speech: Windows) -> Windows:
    """Label short pauses as speech, such as the closure of a consonant: (W,) -> (W,)."""
    bridged, spoken = speech.copy(), np.flatnonzero(speech)
    lengths = np.diff(spoken)  # the windows of a pause, plus one
    is_bridged = (lengths > 1) & (lengths <= SHORT_PAUSE_SECONDS * WINDOWS_PER_SECOND)
    for index in np.flatnonzero(is_bridged):
        bridged[spoken[index] : spoken[index + 1]] = True
    return bridged


def read_speech(value: str, windows: int) -> Windows:
    """Parse the column's value of a clip: -> (W,)."""
    speech = np.zeros(windows, np.bool_)
    for span in value.split():
        start, end = (round(float(time) * WINDOWS_PER_SECOND) for time in span.split("-"))
        speech[start:end] = True
    return speech
