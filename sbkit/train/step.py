"""One training step as one module: what DDP wraps, and what it needs to know before."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from speechbrain import Stage
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from sbkit.base.errors import SbkitError
from sbkit.base.text import listed
from sbkit.distributed.ranks import (
    from_main_rank,
    gather_over_ranks,
    sum_over_ranks,
    world_size,
)
from sbkit.logs.log import say
from sbkit.models.loss import Loss
from sbkit.train.buffers import unchanged
from sbkit.train.out_of_memory import TooLarge, halves

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
        """Return what the recipe predicts and what it loses."""
        outputs = self._forward(batch, Stage.TRAIN)
        return outputs, self._objectives(outputs, batch, Stage.TRAIN)


class DdpStep:
    """A step that is this process's own until it is wrapped: then DDP adds up its gradients.

    The first one is computed outside of DDP, to see by which parameters have a part in the loss.
    DDP would wait for the gradients of the others, which never come, or search for them in every
    step. One that has none in a later step on some rank, a layer that was dropped say, has zero
    there.

    find_unused_parameters: let DDP search, for parameters that join later; none is frozen.
    """

    def __init__(
        self, graph: ForwardLoss, device: torch.device, *, find_unused_parameters: bool = False
    ) -> None:
        self._graph, self._device = graph, device
        self._searches = find_unused_parameters
        self._wrapped: DistributedDataParallel | None = None
        self._is_first = False
        self._sent: list[Any] = []  # buckets of gradients in this step

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Return what the recipe predicts and what it loses."""
        if self._wrapped is None or self._is_first:
            alone: tuple[Any, Any] = self._graph(batch)
            return alone
        self._sent.clear()
        outputs, objective = self._wrapped(batch)
        return outputs, objective if self._searches else reach_all(objective, self._graph)

    @property
    def is_wrapped(self) -> bool:
        """Return whether gradients are added up over the ranks."""
        return self._wrapped is not None

    def wrap(self) -> None:
        """Share the step among the ranks, which begin with the weights of rank 0.

        On GPUs batch normalization sees the batch of all ranks.
        """
        if self._device.type == "cuda":
            share_batch_norms(self._graph)
        self._wrapped = self._with_reducer(init_sync=True)
        self._is_first = not self._searches

    def share_first(self, batch: Any, *, resting: Iterable[nn.Module] = ()) -> None:
        """Average the gradients of the first step; freeze and name what got none on any rank.

        batch: one of the step, to look once more where parameters got none; no random number is
        drawn by it.
        resting: modules that are turned off, which need not be named.
        """
        if not self._is_first:
            return
        unused = freeze_unused(self._graph, batch, self._device)
        known = {id(each) for part in resting for each in part.parameters()}
        parameters = dict(self._graph.parts.named_parameters())
        _tell_unused([name for name in unused if id(parameters[name]) not in known])
        self._is_first = False
        if unused:
            self.renew()
        wrapped: Any = self._wrapped
        # By the buckets and the hook of later steps, which average as they do.
        for bucket in wrapped.reducer._get_zeros_like_grad_buckets():
            pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
            for parameter, share in pairs:
                if parameter.grad is not None:
                    share.copy_(parameter.grad)
            wrapped.reducer._run_comm_hook(bucket).wait()
            for parameter, share in pairs:
                parameter.grad = share.clone()

    def _with_reducer(self, *, init_sync: bool) -> DistributedDataParallel:
        # Of a gradient of another stride over an axis of size one, as a depthwise convolution has.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        wrapped = DistributedDataParallel(
            self._graph,
            device_ids=None if self._device.type == "cpu" else [self._device],
            broadcast_buffers=False,
            init_sync=init_sync,
            find_unused_parameters=self._searches,
            gradient_as_bucket_view=True,
        )
        wrapped.register_comm_hook(self._sent, average_bucket)
        return wrapped

    def require_independent_forward(self) -> None:
        """Raise SbkitError where a rank that begins a batch again would leave others waiting."""
        if any(isinstance(each, nn.SyncBatchNorm) for each in self._graph.modules()):
            raise SbkitError(
                "A batch must fit into memory where batch normalization sees the batch of all "
                "ranks, but one did not, and cannot be split. Lower --batch_seconds."
            )

    def send_zeros(self) -> None:
        """Send zeros for the buckets that a step which broke off on this rank has not sent.

        The other ranks wait for them.
        """
        if self._is_first:
            return
        wrapped: Any = self._wrapped
        left = wrapped.reducer._get_zeros_like_grad_buckets()[len(self._sent) :]
        for bucket in left:
            wrapped.reducer._run_comm_hook(bucket).wait()
        if left and self._searches:
            wrapped._match_unused_params_allreduce()

    def renew(self) -> None:
        """Make the reducer anew, on all ranks: one that broke off waits for the rest for ever."""
        broken: Any = self._wrapped
        broken.reducer = broken.logger = None  # its hooks on the parameters, too
        self._wrapped = self._with_reducer(init_sync=False)

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


def average_bucket(sent: list[Any], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients over the ranks, as DDP does by itself, and note that they were sent."""
    work: Any = dist.all_reduce(bucket.buffer().mul_(1 / world_size()), async_op=True)
    sent.append(work)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return averaged


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
    trainable = [each for each in step.parts.parameters() if each.requires_grad]
    apply: Any = _Reach.apply
    if isinstance(objective, Loss):
        return Loss(apply(objective.sums, *trainable), objective.counts)
    return apply(objective, *trainable)


def freeze_unused(step: ForwardLoss, batch: Any, device: torch.device) -> list[str]:
    """Freeze the parameters that have got no gradient in a step, on any rank, and name them.

    Where some have got none, as of a layer that is dropped at random, a batch is tried again. In
    the other runs a recipe sees each batch once: one may count it, or step a schedule, in its loss.
    Raises SbkitError where an utterance does not fit into memory by itself.
    """
    trainable = [(name, each) for name, each in step.parts.named_parameters() if each.requires_grad]
    unused = _without_gradient(trainable)
    everywhere = _on_all_ranks(unused)
    with unchanged(step.parts, device):
        for _ in range(TRIES - 1):
            if not everywhere:
                break
            for failure in filter(None, gather_over_ranks(_backward(step, batch))):
                failure.refuse()
            unused &= _without_gradient(trainable)
            everywhere = _on_all_ranks(unused)
    for name, parameter in trainable:
        parameter.requires_grad_(name not in everywhere)
    return sorted(everywhere)


def _without_gradient(parameters: Iterable[tuple[str, nn.Parameter]]) -> set[str]:
    return {name for name, each in parameters if each.grad is None}


def _on_all_ranks(names: set[str]) -> set[str]:
    return set.intersection(*gather_over_ranks(names))


def _backward(step: ForwardLoss, batch: Any) -> TooLarge | None:
    """Run forward and backward, in halves where the whole does not fit; return what never does."""
    try:
        torch.autograd.backward(as_loss(step(batch)[1]).sums.sum())
        return None
    except torch.OutOfMemoryError:
        failure = TooLarge.of(batch)
    if not failure.is_splittable:
        return failure
    first, second = halves(batch)
    return _backward(step, first) or _backward(step, second)


def _tell_unused(names: list[str]) -> None:
    if names:
        verb = "gets no gradient and stays" if len(names) == 1 else "get no gradient and stay"
        say(
            f"note: {len(names)} of the model's parameters ({listed(names)}) {verb} as made. For "
            "a part in later steps only, declare find_unused_parameters: True."
        )


@torch.no_grad()
def agree_on_buffers(modules: nn.Module) -> None:
    """Make the buffers of all ranks the same, before they are used in common, or saved.

    What batch normalizations saw is averaged; of all others, such as a running mean of a module of
    the user's, those of rank 0 are taken, which a checkpoint holds.
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


def require_same_weights(modules: nn.Module) -> None:
    """Refuse weights that are not those of rank 0 on every rank: each trains a model of its own.

    Raises SbkitError, on all ranks.
    """
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


def training_loss(brain: Any, batch: Any) -> Loss:
    """Compute a Brain's loss of a batch as in training, on this process alone."""
    with brain.training_ctx:
        outputs = brain.compute_forward(batch, Stage.TRAIN)
        return as_loss(brain.compute_objectives(outputs, batch, Stage.TRAIN))


def as_loss(objective: Any) -> Loss:
    """Return a Loss as it is, and a mean as that of one label; raises SbkitError for others."""
    if isinstance(objective, Loss):
        return objective
    if not isinstance(objective, Tensor) or objective.numel() != 1:
        raise SbkitError(
            "`compute_objectives` must return a sbkit.models.loss.Loss, or a mean as a tensor of "
            f"one number, but returned {objective!r:.100}. Correct it."
        )
    return Loss(objective.reshape(1), torch.ones(1, device=objective.device))
