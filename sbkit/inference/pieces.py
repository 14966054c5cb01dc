"""Audio files in pieces that a model can take: read, and cut where it is quiet."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sbkit.audio.io import Samples, read_audio
from sbkit.base.units import SAMPLE_RATE

LONGEST_PIECE = 30 * SAMPLE_RATE  # attention grows with the square of the length
SHORTEST_PIECE = 20 * SAMPLE_RATE
QUIET_WINDOW = SAMPLE_RATE // 10  # 100 ms, shorter than a pause between words
PIECES_AT_ONCE = 4


def read_pieces(file: Path) -> tuple[int, list[Tensor]]:
    """Read a file: the number of its samples, and its pieces, (S,) of int16 each.

    Raises SbkitError for what is no audio.
    """
    samples = read_audio(file)
    return len(samples), [torch.from_numpy(piece) for piece in cut_at_quiet(samples)]


def batches(pieces: list[Tensor]) -> Iterator[list[Tensor]]:
    """Walk the pieces, a few at a time."""
    for start in range(0, len(pieces), PIECES_AT_ONCE):
        yield pieces[start : start + PIECES_AT_ONCE]


def cut_at_quiet(samples: Samples) -> list[Samples]:
    """Cut long audio where it is quietest, 20 to 30 s into what is left: (S,) -> [(S',), ...]."""
    pieces = []
    while len(samples) > LONGEST_PIECE:
        windows = samples[SHORTEST_PIECE:LONGEST_PIECE].reshape(-1, QUIET_WINDOW).astype(np.float64)
        quietest = int(np.argmin(np.square(windows).sum(1)))
        cut = SHORTEST_PIECE + quietest * QUIET_WINDOW + QUIET_WINDOW // 2
        pieces.append(samples[:cut])
        samples = samples[cut:]
    return [*pieces, samples]
