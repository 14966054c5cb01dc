"""Audio files in pieces that a model can take: read, and cut where it is quiet."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sbkit.audio.io import Samples, read_audio
from sbkit.base.units import SAMPLE_RATE

LONGEST_PIECE = 30  # seconds; attention grows with the square of the length
SHORTEST_PIECE = 20  # seconds
QUIET_WINDOWS = 10  # a second; each is shorter than a pause between words
PIECES_AT_ONCE = 4


def read_pieces(file: Path, sample_rate: int) -> tuple[int, list[Tensor]]:
    """Read a file at a rate: the number of its samples, and its pieces, (S,) of int16 each.

    Raises SbkitError for what is no audio.
    """
    samples = read_audio(file, sample_rate)
    return len(samples), [torch.from_numpy(piece) for piece in cut_at_quiet(samples, sample_rate)]


def batches(pieces: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the pieces, a few at a time."""
    for start in range(0, len(pieces), PIECES_AT_ONCE):
        yield pieces[start : start + PIECES_AT_ONCE]


def cut_at_quiet(samples: Samples, sample_rate: int = SAMPLE_RATE) -> list[Samples]:
    """Cut long audio where it is quietest, 20 to 30 s into what is left: (S,) -> [(S',), ...]."""
    window = sample_rate // QUIET_WINDOWS
    shortest, longest = SHORTEST_PIECE * QUIET_WINDOWS * window, LONGEST_PIECE * sample_rate
    pieces = []
    while len(samples) > longest:
        ahead = samples[shortest : shortest + (longest - shortest) // window * window]
        windows = ahead.reshape(-1, window).astype(np.float64)
        quietest = int(np.argmin(np.square(windows).sum(1)))
        cut = shortest + quietest * window + window // 2
        pieces.append(samples[:cut])
        samples = samples[cut:]
    return [*pieces, samples]
