"""Where speech is in a clip, from its clean audio: a column `speech` of seconds, start-end.

A window of 20 ms is speech where it is no pause by its level and, with a recognizer to align the
transcript, near an aligned word, so that breath and clicks are none. Short pauses are speech.
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
from sbkit.audio.levels import WINDOWS_PER_SECOND, find_pauses
from sbkit.base.checksums import listed_checksums
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.config import WEIGHTS_FILE
from sbkit.data.shard import read_rows
from sbkit.data.splits import Splits
from sbkit.export.export import as_bundle
from sbkit.runtime.segments import SHORT_PAUSE_SECONDS
from sbkit.runtime.torch_model import load_bundle
from sbkit.text.word import Word

SPEECH = "speech"  # the column
NEAR = 0.1  # seconds from a word

Frames = npt.NDArray[np.bool_]


def prepare_speech(knobs: Mapping[str, Any]) -> Splits:
    """Prepare audio, and with an `aligner` label each clip that the corpus itself does not label.

    Raises:
        SbkitError: `aligner` is no recognizer.
    """
    if knobs["aligner"] is None:
        return prepare_audio(knobs)
    with as_bundle(Path(knobs["aligner"])) as folder:
        aligner, weights = load_bundle(folder), listed_checksums(folder)[WEIGHTS_FILE]
    aligner.task.require_prediction("text", command="transcribe")
    splits, rate = prepare_transcripts(knobs), knobs["sample_rate"]
    align = partial(_align, rate=rate, aligner=aligner)
    return with_column(splits, SPEECH, align, identity=[rate, weights])


def _align(split: Dataset, rate: int, aligner: Bundle) -> Iterator[str]:
    """Yield the column's value of each row."""
    for row in read_rows(split, range(len(split))):
        (words,) = aligner.align([row["audio"]], [row["text"]])
        speech = np.pad(find_speech(row["audio"], rate, words).astype(np.int8), 1)
        edges = np.flatnonzero(np.diff(speech)).reshape(-1, 2) / WINDOWS_PER_SECOND
        yield " ".join(f"{start:.2f}-{end:.2f}" for start, end in edges)


def speech_of(row: Mapping[str, Any], sample_rate: int) -> Frames:
    """Say of each window of a clip whether it is speech, by its column or its level: -> (W,)."""
    if SPEECH not in row:
        return find_speech(row["audio"], sample_rate)
    return read_speech(row[SPEECH], len(row["audio"]) // (sample_rate // WINDOWS_PER_SECOND))


def find_speech(samples: Samples, sample_rate: int, words: Sequence[Word] | None = None) -> Frames:
    """Say of each window of 20 ms of clean audio whether it is speech: (S,) -> (W,)."""
    window = sample_rate // WINDOWS_PER_SECOND
    speech = np.ones(len(samples) // window, np.bool_)
    for first, end in find_pauses(samples, window):
        speech[first:end] = False
    if words is not None:
        near = np.zeros_like(speech)
        for word in words:
            first = max(0, round((word.start - NEAR) * WINDOWS_PER_SECOND))
            near[first : round((word.end + NEAR) * WINDOWS_PER_SECOND)] = True
        speech &= near
    return bridge_pauses(speech)


def bridge_pauses(speech: Frames) -> Frames:
    """Take short pauses for speech, as in the closure of a consonant: (W,) -> (W,)."""
    bridged, spoken = speech.copy(), np.flatnonzero(speech)
    lengths = np.diff(spoken)  # a pause's windows and one
    for place in np.flatnonzero(
        (lengths > 1) & (lengths <= SHORT_PAUSE_SECONDS * WINDOWS_PER_SECOND)
    ):
        bridged[spoken[place] : spoken[place + 1]] = True
    return bridged


def read_speech(value: str, windows: int) -> Frames:
    """Read the column's value of a clip: -> (W,)."""
    speech = np.zeros(windows, np.bool_)
    for part in value.split():
        start, end = (round(float(each) * WINDOWS_PER_SECOND) for each in part.split("-"))
        speech[start:end] = True
    return speech
