"""Restore what a skipped step, or one that was only tried, must not change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sbkit.checkpoint.rng import preserve_rng


class RunningStatistics:
    """Restore the buffers that a skipped step wrote to, such as those of batch normalization.

    Otherwise a batch that is not finite would stay in them for ever. The host does not wait to know
    whether the step was skipped, so all are copied before it.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._modules = modules
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copy them, before the first micro-batch of a step."""
        self._before = [
            (module, name, value.clone())
            for module in self._modules.modules()
            for name, value in [*module._buffers.items(), *vars(module).items()]
            if isinstance(value, Tensor)
        ]

    @torch.no_grad()
    def restore(self, skipped: Tensor) -> None:
        """Undo what the step wrote, where ``skipped`` () is true."""
        for module, name, before in self._before:
            now = getattr(module, name, None)  # a module may have another tensor by now
            if isinstance(now, Tensor) and now.shape == before.shape:
                now.copy_(torch.where(skipped, before.to(now.dtype), now))


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
