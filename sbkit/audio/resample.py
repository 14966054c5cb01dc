"""Resampling in blocks: what comes out is what resampling the whole signal would give.

Legend: S samples, N frames of the signal, K samples of the kernel.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

Signal = npt.NDArray[np.float32]  # (S,)

ZEROS = 6  # zero crossings of the windowed sinc on each side, as torchaudio's Resample has
ROLLOFF = 0.99  # of the lower Nyquist frequency, likewise
CHUNK = 1 << 16  # frames convolved at a time: 11 MB from 48 kHz to 16 kHz


def resample_blocks(blocks: Iterable[Signal], rate: int, new_rate: int) -> Iterator[Signal]:
    """Resample a mono signal that comes in blocks (S,) -> (S',), and yield it in blocks.

    A signal of one block is resampled whole. Of longer ones each block is resampled together with
    as much of its neighbours as the kernel is long.

    The exact kernel of a rate like 22 051 Hz takes gigabytes. The nearest ratio of small numbers
    is exact for the usual rates, and within 0.05 % for any.
    """
    new, old = Fraction(new_rate, rate).limit_denominator(1000).as_integer_ratio()
    if new == old:
        yield from blocks
        return
    convolve = _resampler(old, new)
    context = (_half_width(old, new) // old + 2) * old
    held = end_of_signal = np.empty(0, np.float32)
    skipped = 0  # samples at the start of what is held that only lead in
    for block, following in pairwise(chain(blocks, [end_of_signal])):
        is_last = following is end_of_signal
        held = np.concatenate([held, block]) if held.size else block
        end = len(held) if is_last else (len(held) - context) // old * old
        if end <= skipped:
            continue
        yield convolve(held)[skipped // old * new : -(-end * new // old)]
        kept = max(0, end - context)
        held, skipped = held[kept:], end - kept


def _half_width(old: int, new: int) -> int:
    return math.ceil(ZEROS * old / (min(old, new) * ROLLOFF))


@cache
def _resampler(old: int, new: int) -> Callable[[Signal], Signal]:
    """Return what makes ``new`` samples of ``old``: torchaudio's transform where it is installed.

    A server that only runs bundles has no torch; there numpy convolves with the same kernel.
    """
    if find_spec("torchaudio") is None:
        return lambda signal: resample_by_numpy(signal, old, new)
    import torch
    from torchaudio.transforms import Resample

    transform = Resample(old, new)
    return lambda signal: np.asarray(transform(torch.from_numpy(signal)).numpy(), np.float32)


@cache
def _kernel(old: int, new: int) -> Signal:
    """Compute a sinc under a Hann window for each of ``new`` phases: (new, K)."""
    width, cutoff = _half_width(old, new), min(old, new) * ROLLOFF
    place = np.arange(-width, width + old) / old - np.arange(new)[:, None] / new
    place = np.clip(place * cutoff, -ZEROS, ZEROS)
    window = np.cos(place * np.pi / ZEROS / 2) ** 2
    return np.asarray(np.sinc(place) * window * cutoff / old, np.float32)


def resample_by_numpy(signal: Signal, old: int, new: int) -> Signal:
    """Resample a whole signal as torchaudio does, up to the rounding of float32: (S,) -> (S',)."""
    kernel, width = _kernel(old, new), _half_width(old, new)
    padded = np.pad(signal, (width, width + old))
    frames = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[1])[::old]  # (N, K)
    parts = [frames[at : at + CHUNK] @ kernel.T for at in range(0, len(frames), CHUNK)]
    return np.concatenate(parts).reshape(-1)[: -(-len(signal) * new // old)]
