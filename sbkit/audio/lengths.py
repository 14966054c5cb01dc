"""Absolute lengths, masks, and how many frames a part returns.

In sbkit a length is a whole number of samples, frames or tokens in an int64 tensor (B,), which
stays on the CPU in training: the host needs it for CTC, and must not wait for the device.
SpeechBrain's relative lengths (a fraction of the longest in the batch) exist at its border only.
"""

from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

LengthArray = TypeVar("LengthArray", Tensor, npt.NDArray[np.int64])

BUCKETS_PER_OCTAVE = 32  # padded lengths from one power of two to the next


def length_mask(lengths: Tensor, max_length: int, device: torch.device) -> Tensor:
    """Return a mask on a device that is true within each length: (B,) -> (B, T) of bool."""
    positions = torch.arange(max_length, device=device)
    # Copy lengths, not masks: CUDA makes the host wait for more than 64 kB that is not pinned.
    return positions < lengths.to(device, non_blocking=True).unsqueeze(1)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for long sums: float64, except on MPS, which lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Subsampling:
    """The number of frames that strided layers return: (n + offset) // stride for n inputs.

    This holds for a single layer, whether or not it pads and whether it rounds down or up.
    Therefore it holds for a stack of layers. There is a frame every ``stride`` inputs, the first
    one after ``stride - offset`` inputs.

    >>> Subsampling.of_windows(size=400, shift=160).then(Subsampling(stride=4, offset=3))
    Subsampling(stride=640, offset=240)
    """

    stride: int
    offset: int = 0

    @classmethod
    def of_windows(cls, size: int, shift: int) -> Self:
        """Count the whole windows in a length, one every ``shift``."""
        return cls(shift, shift - size)

    def count(self, lengths: LengthArray) -> LengthArray:
        # Clipped first: integer division rounds towards zero in ONNX, and down in torch.
        return (lengths + self.offset).clip(min=0) // self.stride

    def then(self, other: "Subsampling") -> "Subsampling":
        return Subsampling(self.stride * other.stride, self.offset + other.offset * self.stride)


def to_relative(lengths: Tensor, max_length: int) -> Tensor:
    """Convert absolute lengths into SpeechBrain's fractions of the padded length: (B,) -> (B,)."""
    return lengths / max_length


def bucket_of(length: int) -> int:
    """Round a length up to one of 32 per octave.

    Kernels and memory of one shape then serve many batches: three epochs of 8,000 clips of 1.5 to
    10.5 s, joined and at three speeds, in batches of 32 s, have 125 shapes instead of 1,279, for
    1.1 % more padding.
    """
    width = max(1, (1 << max(0, length - 1).bit_length() >> 1) // BUCKETS_PER_OCTAVE)
    return -(-length // width) * width


def append_silence(
    x: Tensor, lengths: Tensor, count: int, value: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Append ``count`` values to each row: (B, S, ...), (B,) -> (B, S + count, ...), (B,)."""
    if count == 0:
        return x, lengths
    x = pad(x, (*(0, 0) * (x.ndim - 2), 0, count))
    within = length_mask(lengths, x.shape[1], x.device)
    return x.where(within.view(*within.shape, *(1,) * (x.ndim - 2)), value), lengths + count


def pad_to_bucket(x: Tensor) -> Tensor:
    """Pad (B, T, D) with zeros to a bucket, except on the CPU, where no length is slow."""
    if x.device.type == "cpu":
        return x
    return pad(x, (0, 0, 0, bucket_of(x.shape[1]) - x.shape[1]))
