"""How many of n frames a stack of strided layers leaves, measured by running it.

A layer with a stride makes floor((n + a) / s) of n, padded or not, rounding down or up, and so does
a stack of such layers: two numbers say it all, whoever wrote the layers.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.text import plural
from sbkit.models.signatures import described, first_tensor, lengths_argument, refuse

Lengths = TypeVar("Lengths", Tensor, npt.NDArray[np.int64])

CONTROLS = (1.37, 2.4, 3.1013, 5.7)  # times the shortest length that is tried
LONGER = (1, 4, 16)  # times, where a part takes nothing as short


@dataclass(frozen=True)
class Striding:
    """A frame every ``stride``, the first after ``stride - offset``."""

    stride: int
    offset: int

    def count(self, lengths: Lengths) -> Lengths:
        """Count what is left of lengths: (B,) -> (B,)."""
        # Clipped first: division of whole numbers rounds to zero in ONNX, and down in torch.
        return (lengths + self.offset).clip(min=0) // self.stride

    def halved(self) -> "Striding":
        """Return that of layers which stride half as far."""
        return Striding(self.stride // 2, self.offset // 2)


def measure_striding(
    count: Callable[[int], int], *, part: str, unit: str, shortest: int
) -> Striding:
    """Find stride and offset by counting what is left of some twenty lengths.

    ``shortest`` is the first length tried; ``unit`` names what lengths count, for the error.
    Raises SbkitError when no stride explains the counts.
    """
    first, twice = count(shortest), count(2 * shortest)
    if twice > first:
        more = twice - first
        widest = shortest // (more - 1) + 1 if more > 1 else 2 * shortest
        lengths = range(shortest, shortest + 2 * widest)
        one, two = (shortest + bisect_left(lengths, first + n, key=count) for n in (1, 2))
        stride = max(two - one, 1)
        found = Striding(stride, (first + 1) * stride - one)
    else:
        found = Striding(shortest, first * shortest)  # as if one more came; the controls tell
    for length in (2 * shortest, *(int(shortest * factor) for factor in CONTROLS)):
        expected, came = (length + found.offset) // found.stride, count(length)
        if came != expected or twice <= first:
            raise SbkitError(
                f"`{part}` must leave frames in proportion to the length of its input, so that it "
                f"is known how many each utterance of a batch has, but leaves {first} of "
                f"{shortest} {unit}, {twice} of {2 * shortest} and {came} of {length}. Give its "
                "layers constant strides, or let its forward take and return lengths."
            )
    return found


@contextmanager
def as_evaluated(part: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a part without gradients, dropout or autocast; modes and random numbers stay."""
    modes = [(each, each.training) for each in part.modules()]
    # Not on meta, where sizes are tried.
    casts = torch.amp.autocast_mode.is_autocast_available(device.type)
    devices = [device] if device.type == "cuda" else []
    try:
        # Without autocast: it would keep casts of the weights that know no gradient.
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
            torch.autocast(device.type, enabled=False) if casts else nullcontext(),
        ):
            part.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


class StridedPart:
    """A part that leaves fewer frames than it is given, called with the lengths that it takes.

    Where it returns no lengths, the frames of an utterance are counted as the part counts those of
    a silent one of that length alone.
    """

    NAME: ClassVar[str]
    SIGNATURES: ClassVar[str]
    NDIMS: ClassVar[tuple[int, ...]]  # of what it returns
    UNIT: ClassVar[str]  # of what it is given
    SHORTEST: ClassVar[int]  # length that is tried first
    TRANSPOSED: ClassVar[str]  # what to say where its last axis grows with the length

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._takes = lengths_argument(part.forward, part=self.NAME, signatures=self.SIGNATURES)
        self._striding: Striding | None = None

    @property
    def minds_lengths(self) -> bool:
        """Return whether it takes lengths as sbkit's do, and nothing then depends on padding."""
        return self._takes.form == "absolute"

    def _run(self, x: Tensor, lengths: Tensor) -> Any:
        return self._part(x, **self._takes.of(x, lengths))

    def _only(self, output: Any, batch: int) -> Tensor:
        """Return the tensor of an output for so many utterances; raises SbkitError."""
        x = first_tensor(output, part=self.NAME, signatures=self.SIGNATURES)
        if x.ndim not in self.NDIMS or x.shape[0] != batch:
            came = f"it returns {described(x)} for {plural(batch, 'utterance')}"
            refuse(self.NAME, self.SIGNATURES, came)
        return x

    def _count(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self._striding is None:
            with as_evaluated(self._part, x.device):
                self._striding = self._measure(x)
        return self._striding.count(lengths)

    def _measure(self, x: Tensor) -> Striding:
        """Measure it by what it makes of one silent utterance of a length: -> (1, U, ...)."""

        def run(length: int) -> Tensor:
            silence = x.new_zeros(1, length, *x.shape[2:])
            return self._only(self._run(silence, torch.tensor([length], device="cpu")), 1)

        shortest = _shortest_taken(run, self.SHORTEST)
        one, two = run(shortest), run(2 * shortest)
        if one.shape[1] == two.shape[1] and one.shape[2] < two.shape[2]:
            raise SbkitError(self.TRANSPOSED.format(shape=tuple(one.shape)))
        return measure_striding(
            lambda length: run(length).shape[1], part=self.NAME, unit=self.UNIT, shortest=shortest
        )


def _shortest_taken(run: Callable[[int], Tensor], shortest: int) -> int:
    """Return the first length that a part takes; a kernel may be longer than a second."""
    for factor in LONGER[:-1]:
        try:
            run(factor * shortest)
        except RuntimeError:
            continue
        return factor * shortest
    return LONGER[-1] * shortest
