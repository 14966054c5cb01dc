"""The command `sbkit classify`: from audio files to labels, with an exported bundle.

Legend: V labels.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.audio.io import stream_audio
from sbkit.base.errors import SbkitError
from sbkit.base.text import printable, printable_json
from sbkit.base.units import samples_to_seconds
from sbkit.inference.bundle.bundle import Bundle
from sbkit.inference.runtime.model import naming_audio
from sbkit.inference.runtime.torch_model import load_bundle
from sbkit.inference.transcribe.command import (
    conclude,
    find_audio,
    open_errors,
    show_seconds,
    write_each,
)
from sbkit.inference.transcribe.pieces import Cutter

SHORTEST = 20.0  # seconds of a piece: one sentence is too short for a label


@dataclass(frozen=True)
class Classification:
    """Which label a file has, and how probable it is to the model (0 to 1)."""

    file: Path
    label: str
    probability: float
    seconds: float

    def __str__(self) -> str:
        """Write the label and its probability."""
        return f"{self.label}\t{self.probability:.4f}"

    def plain(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**asdict(self), "file": str(self.file)}


def classify(options: argparse.Namespace) -> int:
    """Classify the files; one that is no audio does not stop the others. Return the exit code."""

    def write(found: Classification) -> None:
        text = f"{printable(str(found.file))}\t{found}" if len(files) > 1 else str(found)
        if options.format == "json":
            text = printable_json(json.dumps(found.plain(), ensure_ascii=False))
        print(text, flush=True)

    with (
        find_audio(options.files, options.raw_rate) as files,
        open_errors(options.errors) as errors,
        show_seconds("classifying", files, quiet=options.quiet) as on_seconds,
    ):
        results = classify_files(options.bundle, files, own=options.own, on_seconds=on_seconds)
        failed = write_each(files, results, write, errors)
    return conclude(files, failed, options.errors)


def classify_files(
    bundle: Path,
    files: Sequence[Path],
    *,
    own: frozenset[str] = frozenset(),
    on_seconds: Callable[[float], object] = float,
) -> Iterator[Classification | SbkitError]:
    """Classify one file after the other; one that is no audio gives its error and no more.

    on_seconds: called with the seconds of audio that were classified since it was called last.
    """
    loaded = load_bundle(bundle, own=own)
    loaded.task.require("classify")
    for file in files:
        try:
            yield _classify(loaded, file, on_seconds)
        except SbkitError as error:
            yield error


def _classify(bundle: Bundle, file: Path, on_seconds: Callable[[float], object]) -> Classification:
    """Return the most probable label of the pieces of a file, each weighted by its length."""
    labels, rate = bundle.labels.names, bundle.config.sample_rate
    total, samples, seconds = np.zeros(len(labels)), 0, 0.0  # (V,)
    for piece in Cutter(rate, shortest=SHORTEST).pieces(stream_audio(file, rate)):
        with naming_audio(file):
            (probabilities,) = bundle.classify([piece.samples])  # (V,)
        total += len(piece.samples) * probabilities
        samples += len(piece.samples)
        on_seconds(samples_to_seconds(len(piece.samples), rate))
        seconds = samples_to_seconds(piece.start + len(piece.samples), rate)
    best = int(total.argmax())
    return Classification(file, printable(labels[best]), float(total[best] / samples), seconds)
