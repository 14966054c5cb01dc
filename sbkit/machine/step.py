"""One training step as one module: what DDP wraps, and what it needs to know before."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from speechbrain import Stage
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sbkit.nn.loss import Loss
from sbkit.tensors.distributed import gather_over_ranks, sum_over_ranks, world_size

Predict = Callable[[Any, Stage], Any]
Lose = Callable[[Any, Any, Stage], Any]


class StepGraph(nn.Module):
    """Forward and loss in one module.

    One reducer sees every parameter, whichever modules a recipe calls and in whatever order.
    """

    def __init__(self, *, modules: nn.Module, predict: Predict, lose: Lose) -> None:
        super().__init__()
        self.parts = modules
        self._predict, self._lose = predict, lose

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Give what the recipe predicts and what it loses."""
        outputs = self._predict(batch, Stage.TRAIN)
        return outputs, self._lose(outputs, batch, Stage.TRAIN)


def share_step(step: StepGraph, device: torch.device) -> nn.Module:
    """Wrap a step in DDP; on GPUs batch normalization sees the batch of all ranks."""
    if device.type == "cuda":
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        convert(step)
    return DistributedDataParallel(
        step,
        device_ids=None if device.type == "cpu" else [device],
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )


def freeze_unused(step: StepGraph, batch: Any) -> list[str]:
    """Freeze the parameters that get no gradient from a batch, on any rank, and name them.

    DDP would wait for their gradients forever, or search for them in every step. The one dry run
    leaves gradients and buffers as they were.
    """
    buffers = {name: buffer.clone() for name, buffer in step.parts.named_buffers()}
    torch.autograd.backward(as_loss(step(batch)[1]).sums.sum())
    for name, buffer in step.parts.named_buffers():
        buffer.data.copy_(buffers[name])
    trainable = [(name, each) for name, each in step.parts.named_parameters() if each.requires_grad]
    unused = {name for name, parameter in trainable if parameter.grad is None}
    everywhere = set.intersection(*gather_over_ranks(unused))
    for name, parameter in trainable:
        parameter.requires_grad_(name not in everywhere)
        parameter.grad = None
    return sorted(everywhere)


@torch.no_grad()
def average_statistics(modules: nn.Module) -> None:
    """Give all ranks the mean of what their batch normalizations saw, so that they agree on it."""
    if world_size() == 1:
        return
    for module in modules.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            for statistic in (module.running_mean, module.running_var):
                if statistic is not None:
                    sum_over_ranks(statistic).div_(world_size())


def as_loss(objective: Any) -> Loss:
    """Take a Loss as it is, and a plain mean, as SpeechBrain has it, as the loss of one label."""
    if isinstance(objective, Loss):
        return objective
    return Loss(objective.reshape(1), torch.ones(1, device=objective.device))


def mark_last(
    batches: Iterable[Any], *, count: int | None, done: int
) -> Iterator[tuple[Any, bool]]:
    """Tell of each batch whether it is the last of an epoch of which ``done`` were already seen.

    Where the number is not known the walk looks one ahead. That would do everywhere, but a loader
    that saves its place would be one too far.
    """
    if count is not None:
        for number, batch in enumerate(batches, done + 1):
            yield batch, number == count
        return
    before: list[Any] = []
    for batch in batches:
        if before:
            yield before.pop(), False
        before.append(batch)
    for batch in before:
        yield batch, True


def length_of(batches: Any) -> int | None:
    """Count the batches of a loader, None where it does not know."""
    try:
        return len(batches)
    except TypeError:
        return None


def share_of_steps(done: int, count: int | None, accumulation: int) -> float:
    """Tell how much of an epoch lies before the step of the next micro-batch.

    In steps: a schedule that counted micro-batches would depend on the accumulation.
    """
    return (done // accumulation) / -(-count // accumulation) if count else 0.0
