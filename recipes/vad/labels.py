"""Where speech is in a clip, from its clean audio: a column `speech` of seconds, start-end.

A window of 20 ms is speech where it is no pause by its level and, with a recognizer to align the
transcript, near an aligned word, so that breath and clicks are none. Short pauses are speech.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from recipes.prepare import prepare_audio, prepare_transcripts, with_column
from sbkit.audio.io import Samples
from sbkit.audio.levels import WINDOWS
from sbkit.base.errors import SbkitError
from sbkit.checkpoint.integrity import checksum
from sbkit.data.corpora.splits import Splits
from sbkit.data.storage.audio_store import read_rows
from sbkit.inference.bundle.bundle import CONFIG, WEIGHTS, Bundle
from sbkit.inference.bundle.export import as_bundle
from sbkit.inference.runtime.torch_model import load_bundle
from sbkit.inference.transcribe.pieces import SHORT_PAUSE, find_pauses
from sbkit.text.word import Word

SPEECH = "speech"  # the column
NEAR = 0.1  # seconds from a word
VERSION = 1  # raise it when the same clip would have other labels

Frames = npt.NDArray[np.bool_]


def prepare_speech(knobs: Mapping[str, Any]) -> Splits:
    """Prepare audio, and label each clip that the corpus itself does not label.

    Raises:
        SbkitError: `aligner` is no recognizer.
    """
    if knobs["aligner"] is None:
        return _labelled(prepare_audio(knobs), knobs["sample_rate"], None, "level")
    model, splits = Path(knobs["aligner"]), prepare_transcripts(knobs)
    with as_bundle(model) as folder:
        if not (folder / CONFIG).is_file():
            raise SbkitError(
                f"`aligner` must be a run folder or a bundle of a recognizer, but {model} is "
                "neither. Train it first: torchrun train.py hparams/ctc.yaml; or leave it out, "
                "for labels by the level of clean audio alone."
            )
        by = checksum(folder / WEIGHTS)
        return _labelled(splits, knobs["sample_rate"], load_bundle(folder), by)


def _labelled(splits: Splits, rate: int, aligner: Bundle | None, by: str) -> Splits:
    label = partial(_label, rate=rate, aligner=aligner)
    return with_column(splits, SPEECH, label, identity=[VERSION, by, rate])


def _label(split: Dataset, rate: int, aligner: Bundle | None) -> Iterator[str]:
    """Yield the column's value of each row."""
    for row in read_rows(split, range(len(split))):
        words = None if aligner is None else aligner.align([row["audio"]], [row["text"]])[0]
        found = find_speech(row["audio"], rate, words)
        edges = np.flatnonzero(np.diff(np.pad(found.astype(np.int8), 1))).reshape(-1, 2) / WINDOWS
        yield " ".join(f"{start:.2f}-{end:.2f}" for start, end in edges)


def find_speech(samples: Samples, sample_rate: int, words: Sequence[Word] | None) -> Frames:
    """Say of each window of 20 ms of clean audio whether it is speech: (S,) -> (W,)."""
    window = sample_rate // WINDOWS
    speech = np.ones(len(samples) // window, np.bool_)
    for first, end in find_pauses(samples, window):
        speech[first:end] = False
    if words is not None:
        near = np.zeros_like(speech)
        for word in words:
            first = max(0, round((word.start - NEAR) * WINDOWS))
            near[first : round((word.end + NEAR) * WINDOWS)] = True
        speech &= near
    return bridge_pauses(speech)


def bridge_pauses(speech: Frames) -> Frames:
    """Take short pauses for speech, as in the closure of a consonant: (W,) -> (W,)."""
    bridged = speech.copy()
    for before, after in pairwise(np.flatnonzero(speech)):
        if after - before <= SHORT_PAUSE * WINDOWS:
            bridged[before:after] = True
    return bridged


def read_speech(value: str, windows: int) -> Frames:
    """Read the column's value of a clip: -> (W,)."""
    speech = np.zeros(windows, np.bool_)
    for part in value.split():
        start, end = (round(float(each) * WINDOWS) for each in part.split("-"))
        speech[start:end] = True
    return speech
