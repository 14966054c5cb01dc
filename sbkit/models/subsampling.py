"""How many frames a stack of strided layers returns for n samples or frames.

A strided layer returns floor((n + a) / s) frames of n, padded or not, rounding down or up, and so
does a stack of such layers: two numbers describe it, whoever wrote the layers.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sbkit.base.errors import ConfigError

Lengths = TypeVar("Lengths", Tensor, npt.NDArray[np.int64])

CONTROL_FACTORS = (1.37, 2.4, 3.1013, 5.7)  # lengths to verify, in multiples of the shortest


@dataclass(frozen=True)
class Subsampling:
    """A frame every ``stride``, the first after ``stride - offset``."""

    stride: int
    offset: int

    def count(self, lengths: Lengths) -> Lengths:
        # Clipped first: integer division rounds towards zero in ONNX, and down in torch.
        return (lengths + self.offset).clip(min=0) // self.stride

    def then(self, other: "Subsampling") -> "Subsampling":
        """Chain this subsampling and another."""
        return Subsampling(self.stride * other.stride, self.offset + other.offset * self.stride)


def find_subsampling(
    count: Callable[[int], int], *, part: str, unit: str, shortest: int
) -> Subsampling:
    """Find stride and offset from the frame counts of some twenty lengths.

    count: returns the frames of a length.
    part, unit: the name of the part, and the unit of lengths, for the error.
    shortest: the first length.

    Raises:
        ConfigError: no stride explains the counts.
    """
    first, second = count(shortest), count(2 * shortest)
    if second > first:
        frames = second - first
        max_stride = shortest // (frames - 1) + 1 if frames > 1 else 2 * shortest
        lengths = range(shortest, shortest + 2 * max_stride)
        one, two = (shortest + bisect_left(lengths, first + n, key=count) for n in (1, 2))
        stride = max(two - one, 1)
        subsampling = Subsampling(stride, (first + 1) * stride - one)
    else:
        subsampling = Subsampling(shortest, first * shortest)  # fails the comparison below
    for length in (2 * shortest, *(int(shortest * factor) for factor in CONTROL_FACTORS)):
        expected = (length + subsampling.offset) // subsampling.stride
        if (counted := count(length)) != expected or second <= first:
            raise ConfigError(
                f"`{part}` must return frames in proportion to the length of its input, so that "
                f"the frames of each utterance of a batch can be counted, but returns {first} for "
                f"{shortest} {unit}, {second} for {2 * shortest} and {counted} for {length}. "
                "Return (B, U, D) with time second, give its layers constant strides, or declare "
                "`frame_lengths(lengths)` in its class."
            )
    return subsampling


@contextmanager
def as_evaluated(device: torch.device, *parts: nn.Module) -> Iterator[None]:
    """Run parts without gradients, dropout or autocast; restore modes and random numbers after."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    devices = [device] if device.type == "cuda" else []
    try:
        # Without autocast, which would keep casts of the weights that have no gradient.
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
            torch.autocast(device.type, enabled=False),
        ):
            for part in parts:
                part.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
