"""How ranks share one training step: one DistributedDataParallel over forward and loss together."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sbkit.base.errors import ConfigError
from sbkit.base.messages import listed
from sbkit.distributed.ranks import from_main_rank
from sbkit.models.loss import Loss

# What `compute_objectives` returns: sums and counts or a mean, or one of them for each optimizer
Objective = Loss | Tensor | Mapping[str, Loss | Tensor]
Forward = Callable[[object, Stage], object]
ComputeLoss = Callable[[object, object, Stage], Objective]


class ForwardLoss(nn.Module):
    """Forward and loss in one module.

    One reducer sees every parameter, whichever modules a recipe calls and in whatever order. Only
    the loss is returned, because DDP waits for every gradient that an output depends on.
    """

    def __init__(self, modules: nn.Module, forward: Forward, compute_loss: ComputeLoss) -> None:
        super().__init__()
        self.parts = modules
        self.outputs: object = None  # the recipe's predictions for the last batch
        self._forward = forward
        self._compute_loss = compute_loss

    def forward(self, batch: object) -> Objective:
        self.outputs = self._forward(batch, Stage.TRAIN)
        return self._compute_loss(self.outputs, batch, Stage.TRAIN)


class DdpStep:
    """Run forward and loss, on one process until `share`; then DDP adds up the gradients.

    With ``find_unused`` a parameter that no rank used in a step has no gradient, as on one process;
    a parameter that only some ranks used has a gradient of zero on the others. Without it, every
    rank uses every parameter.
    """

    def __init__(self, graph: ForwardLoss, device: torch.device, *, find_unused: bool) -> None:
        self._graph = graph
        self._device = device
        self._find_unused = find_unused
        self._wrapped: DistributedDataParallel | None = None

    def __call__(self, batch: object) -> tuple[object, Objective]:
        """Return the recipe's predictions and its loss."""
        objective = (self._wrapped or self._graph)(batch)
        outputs = self._graph.outputs
        self._graph.outputs = None
        return outputs, objective

    @property
    def is_shared(self) -> bool:
        """Whether gradients are added up over the ranks."""
        return self._wrapped is not None

    def share(self, unused_modules: Iterable[nn.Module] = ()) -> None:
        """Share the step among the ranks, which start with the weights of rank 0.

        On GPUs batch normalization sees the batches of all ranks.
        """
        if self._device.type == "cuda":
            share_batch_norms(self._graph)
        with torch.no_grad():
            for tensor in (*self._graph.parameters(), *self._graph.buffers()):
                from_main_rank(tensor)
        # A depthwise convolution has a gradient of another stride over an axis of size one.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        apply: Callable[..., object] = _Silenced.apply
        apply(self._with_reducer(nn.Linear(1, 1, device=self._device)), self._device)
        self._wrap(unused_modules)

    def renew(self, unused_modules: Iterable[nn.Module] = ()) -> None:
        """Make a new reducer, between two steps, for the parameters that learn from now on."""
        if self.is_shared:
            self.unwrap()
            self._wrap(unused_modules)

    def _wrap(self, unused_modules: Iterable[nn.Module]) -> None:
        """Make the reducer of the parameters that learn.

        ``unused_modules`` are frozen: otherwise the host would wait for the device to learn that no
        rank used them.
        """
        for part in unused_modules:
            part.requires_grad_(False)
        self._wrapped = self._with_reducer(self._graph)

    def check_all_used(self) -> None:
        """Raise ConfigError for a parameter that DDP waits for, but that the step has not used.

        DDP would report it only in the next step, after the others had stepped without its bucket.
        """
        if not self.is_shared or self._find_unused:
            return
        named = self._graph.parts.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if unused:
            raise ConfigError(
                "Every parameter must take part in every step while `find_unused_parameters` is "
                f"false, but {listed(unused)} had no gradient. Set "
                "`find_unused_parameters: True`, or freeze what does not learn."
            )

    def _with_reducer(self, module: nn.Module) -> DistributedDataParallel:
        reducer = DistributedDataParallel(
            module,
            device_ids=None if self._device.type == "cpu" else [self._device],
            init_sync=False,
            find_unused_parameters=self._find_unused,
            gradient_as_bucket_view=True,
        )
        reducer.broadcast_buffers = False  # only the argument has another name since torch 2.14
        return reducer

    def unwrap(self) -> None:
        """Drop the reducer: one that outlives its group ends some runs with SIGABRT."""
        self._wrapped = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of a micro-batch on this rank."""
        return self._wrapped.no_sync() if self._wrapped else nullcontext()


class _Silenced(torch.autograd.Function):
    """Make DDP give its only warning about missing unused parameters here, where it is filtered.

    Within a Function the warning is Python's; elsewhere every rank prints it to stderr.
    """

    @staticmethod
    def forward(ctx: object, module: DistributedDataParallel, device: torch.device) -> None:
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        with torch.enable_grad():
            module(torch.ones(1, 1, device=device))


def share_batch_norms(modules: nn.Module) -> None:
    """Let batch normalizations see the batches of all ranks.

    They stay the same objects, unlike with torch's `convert_sync_batchnorm`: a recipe, or a list of
    frozen modules, may hold them.
    """
    module: Any
    for module in modules.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = nn.SyncBatchNorm
            module.process_group = None  # all ranks
