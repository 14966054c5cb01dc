"""Resample a signal block by block, with the same result as resampling it whole.

soxr was compared with FFmpeg's resampler at eight pairs of rates: it was 1.1 to 4.2 times as fast
for all but one, tones up to 0.9 of the lower Nyquist frequency had errors below -60 dB instead of
-19, and aliases below -130 dB instead of -22. Its blocks equal the whole bit by bit.

Legend: S samples.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

import numpy as np
import soxr

from sbkit.audio.decode import Block, Signal

END: Signal = np.empty(0, np.float32)


def resample_blocks(blocks: Iterable[Block], new_rate: int) -> Iterator[Signal]:
    """Resample consecutive blocks, whose rate may change, and yield signals (S,)."""
    for rate, group in groupby(blocks, key=attrgetter("rate")):
        resampler = Resampler(rate, new_rate)
        for block in group:
            yield resampler.push(block.samples)
        yield resampler.push(END, is_last=True)


class Resampler:
    """Resample a signal whose blocks are pushed one after another.

    The output lags: by 21 ms in the median from 48 kHz to 16 kHz, by 64 ms from 8 kHz.

    >>> resampler = Resampler(48_000, 16_000)
    >>> first = resampler.push(np.zeros(4800, np.float32))
    >>> len(first) + len(resampler.push(END, is_last=True))
    1600
    """

    def __init__(self, rate: int, new_rate: int) -> None:
        self._stream = None
        if rate != new_rate:
            self._stream = soxr.ResampleStream(rate, new_rate, num_channels=1)

    def push(self, block: Signal, *, is_last: bool = False) -> Signal:
        """Return the samples that a block completes: (S,) -> (S',)."""
        if self._stream is None:
            return block
        resampled: Signal = self._stream.resample_chunk(np.ascontiguousarray(block), is_last)
        return resampled
