"""Resampling in blocks: what comes out is what resampling the whole signal would give.

Legend: S samples, N frames of the signal, K samples of the kernel.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Signal = npt.NDArray[np.float32]  # (S,)
END: Signal = np.empty(0, np.float32)

ZEROS = 6  # zero crossings of the windowed sinc on each side, as torchaudio's Resample has
ROLLOFF = 0.99  # of the lower Nyquist frequency, likewise
CHUNK = 1 << 16  # frames convolved at a time: 11 MB from 48 kHz to 16 kHz
MAX_KERNEL_VALUES = 1 << 20  # 4 MB; 11,025 Hz to 16 kHz, the largest of the usual ones, has 0.3 M
MAX_DENOMINATOR = 1000
MAX_KERNELS = 8  # of different rates that are kept

# A kernel takes ten times its memory while it is computed: files of many rates wait for each other.
_computing = threading.Lock()

Convolve = Callable[[Signal, int, int], Signal]  # a whole signal, old and new rate


def resample_blocks(blocks: Iterable[Signal], rate: int, new_rate: int) -> Iterator[Signal]:
    """Resample a mono signal that comes in blocks (S,) -> (S',), and yield it in blocks.

    A signal of one block is resampled whole.
    """
    resampler = Resampler(rate, new_rate, _fastest())
    for block, following in pairwise(chain(blocks, [END])):
        found = resampler.push(block, is_last=following is END)
        if found.size:
            yield found


class Resampler:
    """Resample a mono signal whose blocks are pushed, each with its neighbours' next samples.

    Of them it takes as many as the kernel is long, so that what comes out lags by some samples.

    The exact kernel of a rate like 22 051 Hz takes gigabytes. The nearest ratio of small numbers
    is exact for the usual rates, and within 0.05 % for any, such as 11,127 Hz of old Macs; its
    kernel has at most about MAX_KERNEL_VALUES.
    """

    def __init__(self, rate: int, new_rate: int, convolve: Convolve | None = None) -> None:
        """Begin with the first sample; convolve: by default without torch."""
        largest = math.isqrt(MAX_KERNEL_VALUES * rate // new_rate)
        ratio = Fraction(new_rate, rate).limit_denominator(min(largest, MAX_DENOMINATOR))
        self._new, self._old = ratio.as_integer_ratio()
        self._convolve = resample_by_numpy if convolve is None else convolve
        self._context = (_half_width(self._old, self._new) // self._old + 2) * self._old
        self._held, self._skipped = END, 0  # samples at the start of it that only lead in

    def push(self, block: Signal, *, is_last: bool = False) -> Signal:
        """Return what a further block makes known: (S,) -> (S',); the last one ends the signal."""
        old, new = self._old, self._new
        if new == old:
            return block
        held = np.concatenate([self._held, block]) if self._held.size else block
        end = len(held) if is_last else (len(held) - self._context) // old * old
        if end <= self._skipped:
            self._held = held
            return END
        found = self._convolve(held, old, new)[self._skipped // old * new : -(-end * new // old)]
        kept = max(0, end - self._context)
        self._held, self._skipped = held[kept:], end - kept
        return found


def _half_width(old: int, new: int) -> int:
    return math.ceil(ZEROS * old / (min(old, new) * ROLLOFF))


def _fastest() -> Convolve:
    """Return torchaudio's transform where it is installed.

    A server that only runs bundles has no torch; there numpy convolves with the same kernel.
    """
    return resample_by_numpy if find_spec("torchaudio") is None else _resample_by_torch


def _resample_by_torch(signal: Signal, old: int, new: int) -> Signal:
    import torch

    found = _transform(old, new)(torch.from_numpy(signal)).numpy()
    return np.asarray(found, np.float32)


@lru_cache(MAX_KERNELS)
def _transform(old: int, new: int) -> Any:
    from torchaudio.transforms import Resample

    with _computing:
        return Resample(old, new)


@lru_cache(MAX_KERNELS)
def _kernel(old: int, new: int) -> Signal:
    """Compute a sinc under a Hann window for each of ``new`` phases: (new, K)."""
    width, cutoff = _half_width(old, new), min(old, new) * ROLLOFF
    with _computing:
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
