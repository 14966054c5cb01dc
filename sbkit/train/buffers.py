"""What modules count while they train: undone with a skipped step, the same on all ranks."""

import torch
from torch import Tensor, nn

from sbkit.distributed.ranks import (
    from_main_rank,
    sum_over_ranks,
    world_size,
)


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


@torch.no_grad()
def agree_on_buffers(modules: nn.Module) -> None:
    """Make the buffers of all ranks the same, before an evaluation or a checkpoint.

    The statistics of batch normalizations are averaged; of all other buffers, such as a running
    mean of a module of the user's, those of rank 0 are taken, which a checkpoint holds.
    """
    if world_size() == 1:
        return
    norms = [
        each for each in modules.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)
    ]
    statistics = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
    averaged = {id(each): each for each in statistics if each is not None}
    for statistic in averaged.values():
        sum_over_ranks(statistic).div_(world_size())
    for buffer in modules.buffers():
        if id(buffer) not in averaged and buffer.numel():
            from_main_rank(buffer)
