"""Resampling of a signal in blocks, which gives the same result as resampling it whole.

Legend: S samples, N frames of the signal, K samples of the kernel.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sbkit.base.imports import import_torchaudio

if TYPE_CHECKING:
    from torchaudio.transforms import Resample

Signal = npt.NDArray[np.float32]  # (S,)
END: Signal = np.empty(0, np.float32)

# torchaudio's Resample has the same kernel.
ZERO_CROSSINGS = 6  # of the windowed sinc, on each side
ROLLOFF = 0.99  # its cutoff, as a share of the lower Nyquist frequency
MAX_FRAMES = 1 << 16  # frames convolved at a time: 11 MB from 48 kHz to 16 kHz
MAX_KERNEL_VALUES = 1 << 20  # 4 MB; the largest of the usual ones, 11,025 Hz to 16 kHz, has 0.3 M
MAX_DENOMINATOR = 1000
MAX_CACHED_KERNELS = 8

# Computing a kernel takes ten times its memory, so only one is computed at a time.
_kernel_lock = threading.Lock()

Convolve = Callable[[Signal, int, int], Signal]  # a whole signal, old and new rate


def resample_blocks(blocks: Iterable[Signal], rate: int, new_rate: int) -> Iterator[Signal]:
    """Resample the blocks (S,) of a mono signal, and yield blocks (S',)."""
    # torchaudio's transform is faster, but a server that only runs bundles has no torch.
    convolve = resample_by_numpy if find_spec("torchaudio") is None else _resample_by_torch
    resampler = Resampler(rate, new_rate, convolve)
    for block, next_block in pairwise(chain(blocks, [END])):
        resampled = resampler.push(block, is_last=next_block is END)
        if resampled.size:
            yield resampled


class Resampler:
    """Resample a mono signal whose blocks are pushed one after another, by default with numpy.

    The output lags by the length of the kernel, since a block needs the next samples. The exact
    kernel of a rate like 22,051 Hz takes gigabytes, so the nearest ratio of small numbers is used.
    It is exact for the usual rates, and within 0.05 % for any other, such as 11,127 Hz of old Macs;
    its kernel has at most about MAX_KERNEL_VALUES.

    >>> resampler = Resampler(48_000, 16_000)
    >>> first = resampler.push(np.zeros(4800, np.float32))
    >>> len(first) + len(resampler.push(END, is_last=True))
    1600
    """

    def __init__(self, rate: int, new_rate: int, convolve: Convolve | None = None) -> None:
        max_denominator = math.isqrt(MAX_KERNEL_VALUES * rate // new_rate)
        ratio = Fraction(new_rate, rate).limit_denominator(min(max_denominator, MAX_DENOMINATOR))
        self._new, self._old = ratio.as_integer_ratio()
        self._convolve = resample_by_numpy if convolve is None else convolve
        self._context = (_half_width(self._old, self._new) // self._old + 2) * self._old
        self._buffer = END
        self._lead_in = 0  # samples at the start of the buffer that are already resampled

    def push(self, block: Signal, *, is_last: bool = False) -> Signal:
        """Return the samples that a block completes: (S,) -> (S',)."""
        old, new = self._old, self._new
        if new == old:
            return block
        buffer = np.concatenate([self._buffer, block]) if self._buffer.size else block
        end = len(buffer) if is_last else (len(buffer) - self._context) // old * old
        if end <= self._lead_in:
            self._buffer = buffer
            return END
        resampled = self._convolve(buffer, old, new)
        completed = resampled[self._lead_in // old * new : -(-end * new // old)]
        start = max(0, end - self._context)
        self._buffer, self._lead_in = buffer[start:], end - start
        return completed


def _half_width(old: int, new: int) -> int:
    return math.ceil(ZERO_CROSSINGS * old / (min(old, new) * ROLLOFF))


def _resample_by_torch(signal: Signal, old: int, new: int) -> Signal:
    import torch

    return np.asarray(_transform(old, new)(torch.from_numpy(signal)).numpy(), np.float32)


@lru_cache(MAX_CACHED_KERNELS)
def _transform(old: int, new: int) -> "Resample":
    transforms = import_torchaudio("torchaudio.transforms")
    with _kernel_lock:
        resample: Resample = transforms.Resample(old, new)
    return resample


@lru_cache(MAX_CACHED_KERNELS)
def _kernel(old: int, new: int) -> Signal:
    """Compute a sinc under a Hann window for each of ``new`` phases: (new, K)."""
    width, cutoff = _half_width(old, new), min(old, new) * ROLLOFF
    with _kernel_lock:
        time = np.arange(-width, width + old) / old - np.arange(new)[:, None] / new
        time = np.clip(time * cutoff, -ZERO_CROSSINGS, ZERO_CROSSINGS)
        window = np.cos(time * np.pi / ZERO_CROSSINGS / 2) ** 2
        return np.asarray(np.sinc(time) * window * cutoff / old, np.float32)


def resample_by_numpy(signal: Signal, old: int, new: int) -> Signal:
    """Resample a whole signal like torchaudio, up to the rounding of float32: (S,) -> (S',)."""
    kernel, width = _kernel(old, new), _half_width(old, new)
    padded = np.pad(signal, (width, width + old))
    frames = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[1])[::old]  # (N, K)
    resampled = [
        frames[start : start + MAX_FRAMES] @ kernel.T for start in range(0, len(frames), MAX_FRAMES)
    ]
    return np.concatenate(resampled).reshape(-1)[: -(-len(signal) * new // old)]
