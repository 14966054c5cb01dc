"""Restore what a skipped step, or one that was only tried, must not change."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sbkit.checkpoint.rng import preserve_rng


@dataclass(frozen=True)
class Snapshot:
    """A tensor before a step: where it is held, the writes that it had seen, and its values."""

    module: nn.Module
    name: str
    tensor: Tensor
    writes: int
    values: Tensor

    @classmethod
    def of(cls, module: nn.Module, name: str, tensor: Tensor) -> "Snapshot":
        """Copy a tensor as it is now."""
        return cls(module, name, tensor, tensor._version, tensor.clone())

    def written(self) -> Tensor | None:
        """Return the tensor if it may have been written to since, or replaced by another."""
        now = getattr(self.module, self.name, None)
        is_same = now is self.tensor and self.tensor._version == self.writes
        is_seen = not isinstance(self.module, _NormBase)  # torch does not count its own writes
        return None if not isinstance(now, Tensor) or (is_same and is_seen) else now


class RunningStatistics:
    """Restore the buffers that a skipped step wrote to, such as those of batch normalization.

    Otherwise a batch that is not finite would stay in them for ever. The host does not wait to know
    whether the step was skipped, so each is copied before the step, unless it still is what it was.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._modules = modules
        self._before: list[Snapshot] | None = None

    @torch.no_grad()
    def save(self) -> None:
        """Save them, before the first micro-batch of a step."""
        if self._before is None:
            self._before = [Snapshot.of(*place) for place in _buffers_of(self._modules)]
        for number, before in enumerate(self._before):
            now = before.written()
            if now is not None:
                self._before[number] = Snapshot.of(before.module, before.name, now)

    @torch.no_grad()
    def restore(self, skipped: Tensor) -> None:
        """Undo what the step wrote, where ``skipped`` () is true."""
        for before in self._before or ():
            now = before.written()
            if now is not None and before.values.shape == now.shape:
                now.copy_(torch.where(skipped, before.values.to(now.dtype), now))


def _buffers_of(modules: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the tensors of modules that are none of their parameters, and where they are held."""
    for module in modules.modules():
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, Tensor):
                yield module, name, value


@contextmanager
def unchanged(modules: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back gradients, buffers, modes and random numbers; gradients begin at none."""
    modes = [(each, each.training) for each in modules.modules()]
    buffers = [(each, each.detach().clone()) for each in modules.buffers()]
    gradients = [(each, each.grad) for each in modules.parameters()]
    modules.zero_grad(set_to_none=True)
    try:
        with preserve_rng(device):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
