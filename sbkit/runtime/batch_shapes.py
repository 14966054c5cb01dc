"""Batches of clips of similar length, and the shapes that they may have.

Legend: B clips, S samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self

import numpy as np

from sbkit.audio.io import Samples
from sbkit.base.arrays import Counts, Float32s
from sbkit.base.units import seconds_to_samples

BATCH_CLIPS = (1, 2, 4, 8, 16, 32, 64)
CLIP_SECONDS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30)


@dataclass(frozen=True, kw_only=True)
class BatchShapes:
    """The shapes that batches of clips may have: any shape, or only the shapes of a closed grid.

    The first batch of a shape costs time and memory: torch generates kernels for it, and oneDNN and
    cuDNN choose theirs. So a server warms up all shapes of a closed grid, and uses no others.

    >>> shapes = BatchShapes(max_samples=600, batch_sizes=(1, 2, 4), padded_lengths=(100, 200))
    >>> list(shapes.batches([90, 150, 80, 70, 160]))
    [[3, 2], [0], [1, 4]]
    """

    max_samples: int  # padded audio of a batch of several clips
    batch_sizes: tuple[int, ...] = ()  # clips that a batch may have, ascending from 1
    padded_lengths: tuple[int, ...] = ()  # the samples that clips are padded to, ascending

    @classmethod
    def grid(
        cls,
        sample_rate: int,
        *,
        batch_seconds: float,
        clips: Sequence[int] = BATCH_CLIPS,
        seconds: Sequence[float] = CLIP_SECONDS,
    ) -> Self:
        """Make a closed grid for a sample rate."""
        max_samples = seconds_to_samples(batch_seconds, sample_rate)
        lengths = tuple(seconds_to_samples(length, sample_rate) for length in sorted(seconds))
        sizes = tuple(sorted(clips))
        return cls(max_samples=max_samples, batch_sizes=sizes, padded_lengths=lengths)

    def all_shapes(self) -> list[tuple[int, int]]:
        """List all shapes (B, S) of a closed grid."""
        return [
            (clips, samples)
            for samples, clips in product(self.padded_lengths, self.batch_sizes)
            if clips == 1 or clips * samples <= self.max_samples
        ]

    def batches(self, lengths: Sequence[int], *, min_batches: int = 1) -> Iterator[list[int]]:
        """Group clips by their lengths; yield the indices of each batch, the shortest clips first.

        The clips of a batch are padded to the same length of the grid; without a grid, their
        lengths differ by a factor of at most 2. No silent row is added: seven clips become batches
        of four, two and one.

        min_batches: a batch of several clips has at most this fraction of the audio, so that as
            many batches can run in parallel. One long clip may still leave fewer batches.
        """
        padded = [round_up(length, self.padded_lengths) for length in lengths]
        max_samples = min(self.max_samples, sum(padded) // min_batches)
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        while order:
            max_padded = padded[order[0]]
            if not self.padded_lengths:
                max_padded *= 2
            count = 1
            for index in order[1:]:
                if padded[index] > max_padded or padded[index] * (count + 1) > max_samples:
                    break
                count += 1
            if self.batch_sizes:
                count = max(clips for clips in self.batch_sizes if clips <= count)
            yield order[:count]
            order = order[count:]


def round_up(size: int, sizes: Sequence[int]) -> int:
    """Return the first of ascending sizes that is at least ``size``; ``size`` if there is none."""
    return next((candidate for candidate in sizes if candidate >= size), size)


def pad_clips(
    clips: Sequence[Samples], samples: int, num_rows: int | None = None
) -> tuple[Float32s, Counts]:
    """Pad clips (S,) with zeros to a batch in the scale of int16: -> (B, samples), (B,).

    num_rows: B, by default the number of clips. Rows after the clips are silent, of full length.
    """
    audio = np.zeros((num_rows or len(clips), samples), np.float32)
    lengths = np.full(len(audio), samples, np.int64)
    for row, clip in enumerate(clips):
        audio[row, : len(clip)] = clip
        lengths[row] = len(clip)
    return audio, lengths
