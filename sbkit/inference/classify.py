"""From audio files to labels, with an exported bundle.

Legend: V labels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.base.units import samples_to_seconds
from sbkit.inference.bundle import Bundle, load_bundle
from sbkit.inference.pieces import batches, read_pieces
from sbkit.inference.running import fitting


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


def classify_files(
    bundle: Path, files: Sequence[Path], *, own: frozenset[str] = frozenset()
) -> Iterator[Classification | SbkitError]:
    """Classify one file after the other; one that is no audio gives its error and no more."""
    loaded = load_bundle(bundle, own=own)
    loaded.require_labels()
    for file in files:
        try:
            yield _classify(loaded, file)
        except SbkitError as error:
            yield error


def _classify(bundle: Bundle, file: Path) -> Classification:
    """Return the most probable label of the pieces of a file, each weighted by its length."""
    rate = bundle.config.sample_rate
    count, pieces = read_pieces(file, rate)
    total = torch.zeros(len(bundle.require_labels()))  # (V,)
    for batch in batches(pieces):
        with fitting(file):
            shares = torch.tensor([len(piece) / count for piece in batch])
            total += shares @ bundle.classify(batch).float()
    best = int(total.argmax())
    label = printable(bundle.require_labels()[best])
    return Classification(file, label, float(total[best]), samples_to_seconds(count, rate))
