"""An exponential moving average of the weights, which a run is validated, tested and exported with.

Source: Polyak and Juditsky 1992; the decay is lower in the first steps, as in TensorFlow's
`ExponentialMovingAverage`, so that the weights that a run began with are soon forgotten.

What modules count while they train: undone with a skipped step, the same on all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from torch import Tensor, nn

from sbkit.base.torch_internals import batch_norms
from sbkit.distributed.ranks import (
    from_main_rank,
    sum_over_ranks,
    world_size,
)


@register_checkpoint_hooks
class MovingAverage:
    """Average what learns, and exchange it with the weights of the modules and back.

    A parameter joins with the first step that it learns in. With a ``decay`` of 0 there is none.
    The modules of a checkpoint have the averages, and the file of this has the weights themselves.

    Attributes:
        others: the averages, or the weights while the averages are applied, by the parameter's
            number.
    """

    def __init__(self, modules: nn.Module, decay: float) -> None:
        self._modules, self.decay = modules, decay
        self.others: dict[int, Tensor] = {}
        self._is_applied = False

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """Add the weights after a step, from 1, unless it was ``skipped`` (), on the device."""
        if not self.decay:
            return
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        weight = torch.where(skipped, 0.0, share)
        for number, parameter in enumerate(self._modules.parameters()):
            if number in self.others:
                self.others[number].lerp_(parameter, weight.to(parameter.dtype))
            elif parameter.requires_grad:
                self.others[number] = parameter.clone()

    @torch.no_grad()
    def apply(self, to: bool = True) -> None:
        """Put the averages into the modules, or with ``to`` false their weights back."""
        if to is self._is_applied:
            return
        for number, parameter in enumerate(self._modules.parameters()):
            if number in self.others:
                other, self.others[number] = self.others[number], parameter.clone()
                parameter.copy_(other)
        self._is_applied = to

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the averages meanwhile."""
        before = self._is_applied
        self.apply()
        yield
        self.apply(before)

    @mark_as_saver  # type: ignore[untyped-decorator]
    def _save(self, path: Path) -> None:
        torch.save({"others": self.others, "is_applied": self._is_applied}, path)

    @mark_as_loader  # type: ignore[untyped-decorator]
    def _load(self, path: Path, end_of_epoch: bool) -> None:
        device = next(self._modules.parameters()).device
        saved = torch.load(path, device, weights_only=True)
        self.others, self._is_applied = saved["others"], saved["is_applied"]


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
            for name, value in [
                *module.named_buffers(recurse=False, remove_duplicate=False),
                *vars(module).items(),
            ]
            if isinstance(value, Tensor)
        ]

    @torch.no_grad()
    def restore(self, skipped: Tensor) -> None:
        """Undo what the step wrote, where ``skipped`` () is true."""
        for module, name, before in self._before:
            now = getattr(module, name, None)  # a module may have another tensor by now
            if isinstance(now, Tensor) and now.shape == before.shape:
                now.copy_(torch.where(skipped, before.to(now.dtype), now))


@torch.no_grad()
def agree_on_buffers(modules: nn.Module) -> None:
    """Make the buffers of all ranks the same, before an evaluation or a checkpoint.

    The statistics of batch normalizations are averaged; of all other buffers, such as a running
    mean of a module of the user's, those of rank 0 are taken, which a checkpoint holds.
    """
    if world_size() == 1:
        return
    statistics: list[Tensor | None] = [
        each for norm in batch_norms(modules) for each in (norm.running_mean, norm.running_var)
    ]
    averaged = {id(each): each for each in statistics if each is not None}
    for statistic in averaged.values():
        sum_over_ranks(statistic).div_(world_size())
    for buffer in modules.buffers():
        if id(buffer) not in averaged and buffer.numel():
            from_main_rank(buffer)
