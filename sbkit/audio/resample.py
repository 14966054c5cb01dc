"""Resampling in blocks: what comes out is what resampling the whole signal would give.

Legend: S samples.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torchaudio.transforms import Resample

Signal = npt.NDArray[np.float32]  # (S,)


def resample_blocks(blocks: Iterable[Signal], rate: int, new_rate: int) -> Iterator[Signal]:
    """Resample a mono signal that comes in blocks (S,) -> (S',), and yield it in blocks.

    A signal of one block is resampled whole. Of longer ones each block is resampled together with
    as much of its neighbours as the kernel is long.
    """
    if rate == new_rate:  # torch is not imported for it
        yield from blocks
        return
    import torch

    resampler = _resampler(rate, new_rate)
    old, new = resampler.orig_freq, resampler.new_freq  # `old` samples become `new` ones
    if old == new:
        yield from blocks
        return
    context = (resampler.width // old + 2) * old
    held = np.empty(0, np.float32)
    skipped = 0  # samples at the start of what is held that only lead in
    for block, following in pairwise(chain(blocks, [None])):
        is_last = following is None
        held = np.concatenate([held, block]) if held.size else block
        end = len(held) if is_last else (len(held) - context) // old * old
        if end <= skipped:
            continue
        resampled = np.asarray(resampler(torch.from_numpy(held)).numpy(), dtype=np.float32)
        yield resampled[skipped // old * new : -(-end * new // old)]
        kept = max(0, end - context)
        held, skipped = held[kept:], end - kept


@cache
def _resampler(rate: int, new_rate: int) -> "Resample":
    """Build the kernel for one rate once.

    The exact kernel of a rate like 22 051 Hz takes gigabytes. The nearest ratio of small numbers
    is exact for the usual rates, and within 0.05 % for any.
    """
    from torchaudio.transforms import Resample

    ratio = Fraction(new_rate, rate).limit_denominator(1000)
    return Resample(ratio.denominator, ratio.numerator)
