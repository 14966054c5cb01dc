"""Classify audio files of any length.

Legend: V classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sbkit.audio.io import stream_audio
from sbkit.audio.segments import Segmenter
from sbkit.base.errors import SbkitError
from sbkit.base.messages import printable
from sbkit.base.units import samples_to_seconds
from sbkit.runtime.model_thread import model_errors_as_bundle_errors
from sbkit.runtime.torch_model import TorchBundle, load_bundle

MIN_CLASSIFIED_SECONDS = 20.0  # of a segment: one sentence is too short to be classified


@dataclass(frozen=True)
class Classification:
    """The most probable class of a file, and its probability according to the model (0 to 1)."""

    file: Path
    label: str
    probability: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.label}\t{self.probability:.4f}"

    def plain(self) -> dict[str, object]:
        """Return plain data, for JSON."""
        return {**asdict(self), "file": str(self.file)}


def classify_files(
    folder: Path,
    files: Sequence[Path],
    *,
    user_modules: frozenset[str] = frozenset(),
    on_seconds: Callable[[float], object] = float,
) -> Iterator[Classification | SbkitError]:
    """Classify one file after the other; yield the error of a file that cannot be read.

    on_seconds: called with the seconds of audio that were classified since its last call.
    """
    bundle = load_bundle(folder, user_modules=user_modules)
    bundle.task.require_prediction("label", command="classify")
    for file in files:
        try:
            yield _classify(bundle, file, on_seconds)
        except SbkitError as error:
            yield error


def _classify(
    bundle: TorchBundle, file: Path, on_seconds: Callable[[float], object]
) -> Classification:
    """Return the most probable class of the segments of a file, each weighted by its length."""
    labels = bundle.labels.names
    rate = bundle.config.sample_rate
    total, samples, seconds = np.zeros(len(labels)), 0, 0.0  # (V,)
    segmenter = Segmenter(rate, min_seconds=MIN_CLASSIFIED_SECONDS)
    for segment in segmenter.split(stream_audio(file, rate)):
        with model_errors_as_bundle_errors(file):
            (probabilities,) = bundle.classify([segment.samples])  # (V,)
        total += len(segment.samples) * probabilities
        samples += len(segment.samples)
        on_seconds(samples_to_seconds(len(segment.samples), rate))
        seconds = samples_to_seconds(segment.start + len(segment.samples), rate)
    best = int(total.argmax())
    return Classification(file, printable(labels[best]), float(total[best] / samples), seconds)
