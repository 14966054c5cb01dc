"""How many frames are left of n samples or frames by a stack of strided layers.

A strided layer leaves floor((n + a) / s) of n, padded or not, rounding down or up, and so does a
stack of such layers: two numbers describe it, whoever wrote the layers.
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

from sbkit.base.errors import SbkitError

Lengths = TypeVar("Lengths", Tensor, npt.NDArray[np.int64])

CONTROLS = (1.37, 2.4, 3.1013, 5.7)  # times the shortest length that is tried


@dataclass(frozen=True)
class Subsampling:
    """A frame every ``stride``, the first after ``stride - offset``."""

    stride: int
    offset: int

    def count(self, lengths: Lengths) -> Lengths:
        """Count what is left of lengths: (B,) -> (B,)."""
        # Clipped first: integer division rounds to zero in ONNX, and down in torch.
        return (lengths + self.offset).clip(min=0) // self.stride

    def then(self, other: "Subsampling") -> "Subsampling":
        """Return what is left after both, this one first."""
        return Subsampling(self.stride * other.stride, self.offset + other.offset * self.stride)


def find_subsampling(
    count: Callable[[int], int], *, part: str, unit: str, shortest: int
) -> Subsampling:
    """Find stride and offset from the counts of some twenty lengths, ``shortest`` the first.

    ``unit`` names what lengths count, for the error.
    Raises SbkitError when no stride explains the counts.
    """
    first, twice = count(shortest), count(2 * shortest)
    if twice > first:
        more = twice - first
        widest = shortest // (more - 1) + 1 if more > 1 else 2 * shortest
        lengths = range(shortest, shortest + 2 * widest)
        one, two = (shortest + bisect_left(lengths, first + n, key=count) for n in (1, 2))
        stride = max(two - one, 1)
        found = Subsampling(stride, (first + 1) * stride - one)
    else:
        found = Subsampling(shortest, first * shortest)  # fails the comparison below
    for length in (2 * shortest, *(int(shortest * factor) for factor in CONTROLS)):
        expected, came = (length + found.offset) // found.stride, count(length)
        if came != expected or twice <= first:
            raise SbkitError(
                f"`{part}` must leave frames in proportion to the length of its input, so that it "
                f"is known how many each utterance of a batch has, but leaves {first} of "
                f"{shortest} {unit}, {twice} of {2 * shortest} and {came} of {length}. Return "
                "(B, U, D) with time second, give its layers constant strides, or declare "
                "`frame_lengths(lengths)` in its class."
            )
    return found


@contextmanager
def as_evaluated(device: torch.device, *parts: nn.Module) -> Iterator[None]:
    """Run parts without gradients, dropout or autocast; restore modes and random numbers after."""
    modes = [(each, each.training) for part in parts for each in part.modules()]
    devices = [device] if device.type == "cuda" else []
    try:
        # Without autocast: it would keep casts of the weights that know no gradient.
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
