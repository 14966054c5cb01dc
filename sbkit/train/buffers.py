"""Running statistics of modules, which a skipped step must not change."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True)
class BufferRef:
    """Where a module holds a tensor that is none of its parameters."""

    module: nn.Module
    name: str

    def read(self) -> Tensor | None:
        """Return the tensor; a module may have taken it away."""
        value = getattr(self.module, self.name, None)
        return value if isinstance(value, Tensor) else None

    @property
    def is_normalizations(self) -> bool:
        """Return whether it is torch's to write, which does not count these writes."""
        return isinstance(self.module, _NormBase)


@dataclass(frozen=True)
class Snapshot:
    """A tensor before a step: itself, the number of writes that it had seen, and its values."""

    tensor: Tensor
    writes: int
    values: Tensor | None  # copied where such a tensor is known to be written

    def is_written(self, now: Tensor) -> bool:
        """Return whether the step wrote to it, or put another in its place."""
        return now is not self.tensor or now._version != self.writes


class RunningStatistics:
    """Restore the buffers that a skipped step wrote to, such as those of batch normalization.

    Otherwise a batch that is not finite would stay in them for ever. The host does not wait to know
    whether the step was skipped. Before the first step all are copied, then those that get written.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._modules = modules
        self._before: dict[BufferRef, Snapshot] = {}
        self._written: set[BufferRef] | None = None

    @torch.no_grad()
    def save(self) -> None:
        """Save them, before the first micro-batch of a step."""
        known = list(self._before) or list(_buffers_of(self._modules))
        self._before = {}
        for place in known:
            tensor = place.read()
            if tensor is not None:
                is_copied = self._written is None or place in self._written
                values = tensor.clone() if is_copied else None
                self._before[place] = Snapshot(tensor, tensor._version, values)

    @torch.no_grad()
    def restore(self, skipped: Tensor) -> None:
        """Undo what the step wrote, where ``skipped`` () is true."""
        written = set(self._written or ())
        for place, before in self._before.items():
            now = place.read()
            if now is None or not (place.is_normalizations or before.is_written(now)):
                continue
            written.add(place)
            if before.values is not None and before.values.shape == now.shape:
                now.copy_(torch.where(skipped, before.values.to(now.dtype), now))
        self._written = written


def _buffers_of(modules: nn.Module) -> Iterator[BufferRef]:
    for module in modules.modules():
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, Tensor):
                yield BufferRef(module, name)
