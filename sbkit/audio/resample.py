"""Resample a signal block by block, with the same result as resampling it whole.

Legend: S samples, N frames (steps of the kernel), K samples that the kernel covers.
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
MAX_FRAMES = 1 << 16  # convolved at a time: 11 MB from 48 kHz to 16 kHz, 124 MB from 44.1 kHz
MAX_KERNEL_VALUES = 1 << 20  # 4 MB; the largest of the usual ones, 11,025 Hz to 16 kHz, has 0.3 M
MAX_DENOMINATOR = 1000
MAX_CACHED_KERNELS = 8

# Computing a kernel takes ten times its memory, so only one is computed at a time.
_kernel_lock = threading.Lock()

ResampleWhole = Callable[[Signal, int, int], Signal]  # of a whole signal, old and new rate


def resample_blocks(blocks: Iterable[Signal], rate: int, new_rate: int) -> Iterator[Signal]:
    """Resample the blocks (S,) of a mono signal, and yield blocks (S',)."""
    # torchaudio's transform is faster, but a server that only runs bundles has no torch.
    has_torchaudio = find_spec("torchaudio") is not None
    resample_whole = _resample_by_torch if has_torchaudio else resample_by_numpy
    resampler = Resampler(rate, new_rate, resample_whole)
    for block, next_block in pairwise(chain(blocks, [END])):  # the last block is paired with END
        resampled = resampler.push(block, is_last=next_block is END)
        if resampled.size:
            yield resampled


class Resampler:
    """Resample a mono signal whose blocks are pushed one after another, by default with numpy.

    The output lags by the length of the kernel, because the kernel of a sample covers the samples
    after it. The exact kernel of a rate like 22,051 Hz would take gigabytes. So the resampler uses
    the nearest ratio whose kernel has at most about MAX_KERNEL_VALUES. The usual rates have such a
    ratio; for others, such as the 11,127 Hz of old Macs, the speed is wrong by up to 0.06 %.

    >>> resampler = Resampler(48_000, 16_000)
    >>> first = resampler.push(np.zeros(4800, np.float32))
    >>> len(first) + len(resampler.push(END, is_last=True))
    1600
    """

    def __init__(
        self, rate: int, new_rate: int, resample_whole: ResampleWhole | None = None
    ) -> None:
        max_denominator = math.isqrt(MAX_KERNEL_VALUES * rate // new_rate)
        ratio = Fraction(new_rate, rate).limit_denominator(min(max_denominator, MAX_DENOMINATOR))
        self._up, self._down = ratio.as_integer_ratio()  # a frame: _down samples in, _up out
        self._resample_whole = resample_whole or resample_by_numpy
        # Frames that the kernel covers on each side: one more for the rounding, and one because it
        # reaches past the end of its own frame.
        context_frames = _half_width(self._down, self._up) // self._down + 2
        self._context = context_frames * self._down
        self._buffer = END
        self._lead_in = 0  # samples at the start of the buffer that are already resampled

    def push(self, block: Signal, *, is_last: bool = False) -> Signal:
        """Return the samples that a block completes: (S,) -> (S',)."""
        if self._up == self._down:
            return block
        buffer = block
        if self._buffer.size:
            buffer = np.concatenate([self._buffer, block])
        end = len(buffer)
        if not is_last:
            end = (end - self._context) // self._down * self._down
        if end <= self._lead_in:
            self._buffer = buffer
            return END
        resampled = self._resample_whole(buffer, self._down, self._up)
        new_start = self._lead_in // self._down * self._up
        new_end = _ceil_div(end * self._up, self._down)
        start = max(0, end - self._context)
        self._buffer = buffer[start:]
        self._lead_in = end - start
        return resampled[new_start:new_end]


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _half_width(old: int, new: int) -> int:
    return math.ceil(ZERO_CROSSINGS * old / (min(old, new) * ROLLOFF))


def _resample_by_torch(signal: Signal, old: int, new: int) -> Signal:
    import torch

    if not signal.flags.writeable:  # torch warns about memory that it must not write
        signal = signal.copy()
    resampled = _torch_resampler(old, new)(torch.from_numpy(signal))
    return np.asarray(resampled.numpy(), np.float32)


@lru_cache(MAX_CACHED_KERNELS)
def _torch_resampler(old: int, new: int) -> "Resample":
    transforms = import_torchaudio("torchaudio.transforms")
    with _kernel_lock:
        resample: Resample = transforms.Resample(old, new)
    return resample


@lru_cache(MAX_CACHED_KERNELS)
def _kernel(old: int, new: int) -> Signal:
    """Compute the kernel of each of the ``new`` samples of a frame: (new, K).

    A kernel is a sinc under a Hann window, shifted to the time of its sample.
    """
    width = _half_width(old, new)
    cutoff = min(old, new) * ROLLOFF
    with _kernel_lock:
        time = np.arange(-width, width + old) / old - np.arange(new)[:, None] / new
        time = np.clip(time * cutoff, -ZERO_CROSSINGS, ZERO_CROSSINGS)
        window = np.cos(time * np.pi / ZERO_CROSSINGS / 2) ** 2
        return np.asarray(np.sinc(time) * window * cutoff / old, np.float32)


def resample_by_numpy(signal: Signal, old: int, new: int) -> Signal:
    """Resample a whole signal like torchaudio, up to the rounding of float32: (S,) -> (S',)."""
    kernel = _kernel(old, new)
    width = _half_width(old, new)
    padded = np.pad(signal, (width, width + old))
    frames = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[1])[::old]  # (N, K)
    resampled = [
        frames[start : start + MAX_FRAMES] @ kernel.T for start in range(0, len(frames), MAX_FRAMES)
    ]
    return np.concatenate(resampled).reshape(-1)[: _ceil_div(len(signal) * new, old)]
