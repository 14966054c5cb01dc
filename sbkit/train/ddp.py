"""How ranks share one training step: one DistributedDataParallel over forward and loss together."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sbkit.base.errors import SbkitError
from sbkit.base.text import listed
from sbkit.distributed.ranks import (
    from_main_rank,
    gather_over_ranks,
    sum_over_ranks,
    world_size,
)
from sbkit.logs.log import log
from sbkit.models.loss import Loss
from sbkit.train.buffers import unchanged

TRIES = 5  # steps in which a parameter may get no gradient before it counts as one that gets none
Forward = Callable[[Any, Stage], Any]
Objective = Callable[[Any, Any, Stage], Any]


class ForwardLoss(nn.Module):
    """Forward and loss in one module.

    One reducer sees every parameter, whichever modules a recipe calls and in whatever order.
    """

    def __init__(self, *, modules: nn.Module, forward: Forward, objectives: Objective) -> None:
        super().__init__()
        self.parts = modules
        self._forward, self._objectives = forward, objectives

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """Return the recipe's predictions and its loss."""
        outputs = self._forward(batch, Stage.TRAIN)
        return outputs, self._objectives(outputs, batch, Stage.TRAIN)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that are not frozen, by name."""
        yield from ((n, each) for n, each in self.parts.named_parameters() if each.requires_grad)


class DdpStep:
    """A step of this process alone until it is shared: then DDP adds up its gradients.

    The first shared step is computed outside of DDP, to see which parameters the loss depends on:
    DDP would wait for the gradients of the others, which never come, or search for them in every
    step. A parameter without a gradient in a later step on some rank, as of a layer that is dropped
    at random, has a gradient of zero there.

    backward: adds the gradient of what `compute_objectives` returned.
    find_unused_parameters: let DDP search, for parameters that join later; none is frozen.
    """

    def __init__(
        self,
        graph: ForwardLoss,
        device: torch.device,
        *,
        backward: Callable[[Any], object],
        find_unused_parameters: bool = False,
    ) -> None:
        self._graph, self._device, self._backward = graph, device, backward
        self._searches = find_unused_parameters
        self._wrapped: DistributedDataParallel | None = None
        self._is_first = False

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Return the recipe's predictions and its loss."""
        if self._wrapped is None:
            own: tuple[Any, Any] = self._graph(batch)
            return own
        outputs, objective = self._wrapped(batch)
        return outputs, objective if self._searches else reach_all(objective, self._graph)

    @property
    def is_shared(self) -> bool:
        """Return whether gradients are added up over the ranks."""
        return self._is_first or self._wrapped is not None

    def share(self) -> None:
        """Share the step among the ranks, which begin with the weights of rank 0.

        On GPUs batch normalization sees the batch of all ranks.
        """
        if self._device.type == "cuda":
            share_batch_norms(self._graph)
        with torch.no_grad():
            for each in (*self._graph.parameters(), *self._graph.buffers()):
                from_main_rank(each)
        self._is_first = not self._searches
        if self._searches:
            self._wrapped = self._with_reducer()

    def share_first(self, batch: Any, *, inactive: Iterable[nn.Module] = ()) -> None:
        """Average the gradients of the first step; freeze and name what got none on any rank.

        batch: one of the step, to try once more where parameters got none; no random number is
        drawn by it.
        inactive: modules that are turned off, which need not be named.
        """
        if not self._is_first:
            return
        unused = self._freeze_unused(batch)
        known = {id(each) for part in inactive for each in part.parameters()}
        parameters = dict(self._graph.parts.named_parameters())
        if names := [name for name in unused if id(parameters[name]) not in known]:
            log(
                f"note: {len(names)} of the model's parameters ({listed(names)}) get no gradient "
                "and stay as made. For a part in later steps only, declare "
                "find_unused_parameters: True."
            )
        for _, each in self._graph.trainable():
            gradient = torch.zeros_like(each) if each.grad is None else each.grad.contiguous()
            each.grad = sum_over_ranks(gradient.mul_(1 / world_size()))  # as DDP averages
        self._is_first = False
        self._wrapped = self._with_reducer()

    def _with_reducer(self) -> DistributedDataParallel:
        # Of a gradient of another stride over an axis of size one, as a depthwise convolution has.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        return DistributedDataParallel(
            self._graph,
            device_ids=None if self._device.type == "cpu" else [self._device],
            broadcast_buffers=False,
            init_sync=False,
            find_unused_parameters=self._searches,
            gradient_as_bucket_view=True,
        )

    def _freeze_unused(self, batch: Any) -> list[str]:
        """Freeze the parameters that got no gradient in a step on any rank, and name them.

        Where some got none, as of a layer that is dropped at random, a batch is tried again. In
        other runs a recipe sees each batch once: its loss may count batches or step a schedule.
        """
        trainable = dict(self._graph.trainable())

        def without_gradient() -> set[str]:
            mine = {name for name, each in trainable.items() if each.grad is None}
            return set.intersection(*gather_over_ranks(mine))

        unused = without_gradient()
        with unchanged(self._graph.parts, self._device):
            for _ in range(TRIES - 1):
                if not unused:
                    break
                self._backward(self._graph(batch)[1])
                unused &= without_gradient()
        for name in unused:
            trainable[name].requires_grad_(False)
        return sorted(unused)

    def unwrap(self) -> None:
        """Drop the reducer: one that outlives its group ends some runs with SIGABRT."""
        self._wrapped, self._is_first = None, False

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients on this rank while a batch is still being accumulated."""
        return self._wrapped.no_sync() if self._wrapped else nullcontext()


def share_batch_norms(modules: nn.Module) -> None:
    """Let batch normalizations see the batch of all ranks.

    They stay the modules that they are, unlike with torch's `convert_sync_batchnorm`: a recipe, or
    what is frozen by name, may hold them.
    """
    each: Any
    for each in modules.modules():
        if type(each) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            each.__class__ = nn.SyncBatchNorm
            each.process_group = None  # that of all


class _Reach(torch.autograd.Function):
    """Connect parameters to a loss without a gradient for them, which DDP counts as zero."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, *parameters: Tensor) -> Tensor:
        return sums.view_as(sums)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        return *slopes, *[None] * (len(ctx.needs_input_grad) - 1)


def reach_all(objective: Any, step: ForwardLoss) -> Any:
    """Connect the loss to every parameter: each then reports to DDP in every step."""
    if isinstance(objective, Mapping):
        return {name: reach_all(each, step) for name, each in objective.items()}
    trainable = [each for _, each in step.trainable()]
    apply: Any = _Reach.apply
    if isinstance(objective, Loss):
        return Loss(apply(objective.sums, *trainable), objective.counts)
    return apply(objective, *trainable)


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


def check_same_weights(modules: nn.Module) -> None:
    """Raise SbkitError, on all ranks, where they have other weights than rank 0."""
    if world_size() == 1:
        return
    mine = {name: each.detach().double().sum().item() for name, each in modules.named_parameters()}
    everyone = gather_over_ranks(mine)
    for name in mine:
        if len({str(each[name]) for each in everyone}) > 1:  # as text, where nan is nan
            raise SbkitError(
                f"All ranks must have the same weights, but `{name.replace('.module.', '.')}` "
                "differs: its gradients are not added up over them. Call each module as "
                "`self.modules.NAME`, by which SpeechBrain's DDP sees it, and step on all ranks."
            )
