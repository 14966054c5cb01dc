"""What a step is made of: its losses, forward and loss shared among the ranks, clipping, the flag.

`sbkit.train.loop` puts them together.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from speechbrain import Stage
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sbkit.base.errors import ConfigError
from sbkit.base.messages import listed
from sbkit.base.torch_internals import found_inf_tensors, reads_found_inf
from sbkit.distributed.ranks import copy_from_rank0, drop_reducer
from sbkit.models.loss import Loss
from sbkit.train.model_state import BufferSnapshot, MovingAverage
from sbkit.train.nonfinite import NonFiniteRecorder
from sbkit.train.optimizers import Freezing

# What `compute_objectives` returns: sums and counts or a mean, or one of them for each optimizer
Objective = Loss | Tensor | Mapping[str, Loss | Tensor]
Forward = Callable[[object, Stage], object]
ComputeLoss = Callable[[object, object, Stage], Objective]

ONLY_LOSS = "loss"  # the name of a single loss


class TrainingStep:
    """The state of a step while its micro-batches add up; `sbkit.train.loop` takes it.

    Attributes:
        ddp: the recipe's forward and loss, shared among the ranks.
        buffers: the running statistics before the step.
        counts: for each loss of the micro-batches so far, on this rank, its labels and how many
            were not finite, (losses, 2); None before the first one.
        loss_names: of `counts`.
        num_bad: losses of the step that are not finite, on all ranks: ().
    """

    def __init__(
        self,
        modules: nn.Module,
        forward: Forward,
        compute_loss: ComputeLoss,
        *,
        device: torch.device,
        freezing: Freezing,
        find_unused: bool,
        ema_decay: float,
    ) -> None:
        """Make a step of all modules that may learn, from the recipe's hooks.

        find_unused: whether a rank may leave a parameter out of a step.
        ema_decay: decay of the moving average of the weights; 0 for none.
        """
        self._modules = modules
        self.freezing = freezing
        graph = ForwardLoss(modules, forward, compute_loss)
        self.ddp = DdpStep(graph, device, find_unused=find_unused)
        self.moving_average = MovingAverage(modules, ema_decay)
        self.nonfinite = NonFiniteRecorder()
        self.epoch = 0
        self.buffers = BufferSnapshot(modules)
        self.counts: Tensor | None = None
        self.loss_names: list[str] = []
        self.num_bad = torch.zeros((), device=device)

    def start_epoch(self, epoch: int) -> None:
        """Forget the micro-batches of an unfinished step, and go to training mode."""
        self.counts = None
        self.epoch = epoch
        self.train_mode()

    def train_mode(self) -> None:
        """Put the modules into training mode, and frozen ones into evaluation mode."""
        self.moving_average.swap_out()
        self._modules.train()
        self.freezing.set_mode()

    def freeze(self, step: int) -> None:
        """Freeze and release the parts that change after an optimizer step."""
        if self.freezing.advance(step):
            self.train_mode()
            self.ddp.renew()


# ---- losses of a recipe


def match_losses(objective: object, optimizers: Iterable[str]) -> dict[str, Loss]:
    """Return the losses by name; several come in the order of their optimizers."""
    losses = as_losses(objective)
    names = [*optimizers]
    if not isinstance(objective, Mapping):
        return losses
    if losses.keys() != {*names}:
        raise ConfigError(
            f"`compute_objectives` must return a loss for each of `optimizers` "
            f"({', '.join(names)}), but returned {', '.join(losses)}.",
            keys=("optimizers",),
        )
    return {name: losses[name] for name in names}


def as_losses(objective: object) -> dict[str, Loss]:
    """Return the losses of `compute_objectives` by name; a single one is called `loss`.

    A mean counts as the loss of one label.
    """
    if isinstance(objective, Mapping) and objective:
        return {name: as_loss(loss) for name, loss in objective.items()}
    if isinstance(objective, Loss):
        return {ONLY_LOSS: objective}
    if not isinstance(objective, Tensor) or objective.numel() != 1:
        raise ConfigError(
            "`compute_objectives` must return a sbkit.models.loss.Loss or a mean, or a mapping of "
            f"them by optimizer, but returned {objective!r:.100}."
        )
    return {ONLY_LOSS: Loss(objective.reshape(1), torch.ones(1, device=objective.device))}


def as_loss(objective: object) -> Loss:
    """Return the loss that is logged and that ranks checkpoints: the first of several."""
    return next(iter(as_losses(objective).values()))


def detached(objective: Objective) -> Objective:
    """Return the result of `compute_objectives` without its graph."""
    if isinstance(objective, Mapping):
        return {name: loss.detach() for name, loss in objective.items()}
    return objective.detach()


# ---- forward and loss, shared among the ranks


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
        objective = (self._wrapped or self._graph)(batch)
        outputs = self._graph.outputs
        self._graph.outputs = None
        return outputs, objective

    @property
    def is_shared(self) -> bool:
        return self._wrapped is not None

    def share(self) -> None:
        """Share the step among the ranks, which start with the weights of rank 0.

        On GPUs batch normalization sees the batches of all ranks.
        """
        if self._device.type == "cuda":
            share_batch_norms(self._graph)
        with torch.no_grad():
            for tensor in (*self._graph.parameters(), *self._graph.buffers()):
                copy_from_rank0(tensor)
        # A depthwise convolution has a gradient of another stride over an axis of size one.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        apply: Callable[..., object] = _Silenced.apply
        probe = self._with_reducer(nn.Linear(1, 1, device=self._device))
        apply(probe, self._device)
        drop_reducer(probe)
        self._wrapped = self._with_reducer(self._graph)

    def renew(self) -> None:
        """Make a new reducer, between two steps, for the parameters that learn from now on."""
        if self.is_shared:
            self.unwrap()
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
                f"{listed(unused)} had no gradient in this step. Set "
                "`find_unused_parameters: True`."
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
        """Drop the reducers of the step, and of modules that a recipe's own step has wrapped."""
        if self._wrapped is not None:
            drop_reducer(self._wrapped)
        self._wrapped = None
        parts: Any = self._graph.parts
        for name, module in parts.items():
            if isinstance(module, DistributedDataParallel):
                drop_reducer(module)
                parts[name] = module.module

    def no_sync(self) -> AbstractContextManager[None]:
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


def clip_gradients(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Clip all groups of an optimizer by one norm; return the norm before clipping: ().

    Each optimizer is clipped on its own, as in SpeechBrain: the optimizer of a pretrained encoder,
    for example, is not held back by the gradients of a new head. A ``max_norm`` that is not
    positive clips nothing; PyTorch would reverse the gradient.
    """
    limit = max_norm if max_norm > 0 else math.inf
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], limit)


def step_unless(skipped: Tensor, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Step the optimizer, unless ``skipped`` () is true; then it and its parameters do not change.

    ``skipped`` is on the device. A fused optimizer reads the flag there, as with a GradScaler. For
    any other optimizer the host waits for the flag; on the CPU this costs nothing.
    """
    if scaler.is_enabled():
        for found_inf in found_inf_tensors(scaler, optimizer):
            found_inf.copy_(skipped)
        scaler.step(optimizer)
    elif reads_found_inf(optimizer):
        fused: Any = optimizer
        fused.grad_scale = None
        fused.found_inf = skipped.to(torch.float32)
        scaler.step(optimizer)
        del fused.grad_scale, fused.found_inf
    elif not bool(skipped):
        scaler.step(optimizer)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]
