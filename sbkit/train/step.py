"""One training step, from a micro-batch to new weights, in the order in which it happens.

    forward and loss -> backward -> (once the global batch is complete:) divide by the labels of all
    ranks -> unscale and clip -> step, unless a loss or a gradient is not finite

Losses are sums and counts, so that micro-batches and ranks add up to the gradient of the mean over
the global batch. The host does not wait for the device: whether a step was skipped is read now and
then. SpeechBrain's hooks of a step keep their names and order.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import reduce
from pathlib import Path
from typing import Any

import speechbrain as sb
import torch
import torch.distributed as dist
from speechbrain import Stage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sbkit.audio.draws import seeded_draws
from sbkit.base.errors import SbkitError
from sbkit.base.torch_internals import multiply_gradients
from sbkit.checkpoint.rng import seed_step
from sbkit.config.hparams import KnobAttributes, Knobs
from sbkit.distributed.device import Placement, check_precision, resolve
from sbkit.distributed.ranks import sum_over_ranks, world_size
from sbkit.models.compiling import compile_blocks
from sbkit.models.loss import Loss
from sbkit.train.ddp import DdpStep, ForwardLoss
from sbkit.train.moving_average import MovingAverage, RunningStatistics
from sbkit.train.nonfinite import NonFiniteRecorder, explained_memory, ids_of
from sbkit.train.optimizers import (
    Freezing,
    clip,
    make_optimizers,
    named_parameters,
    step_unless,
    with_gradient,
    with_lr_scale,
)
from sbkit.train.options import check_hooks, declared_options
from sbkit.train.schedule import read_schedule, set_rate
from sbkit.train.scoring import Scoring

ONLY = "loss"  # the name of a loss that has none


class StepBrain(Scoring, sb.Brain):  # type: ignore[misc]
    """Train what a recipe defines, one step at a time.

    `device` may be a string or a torch.device; only its type reaches autocast and GradScaler.
    Raises SbkitError when device and precision do not go together here.

    Attributes:
        epoch_share: how much of the current epoch lies before the current step.
        step, optimizer_step: micro-batches of the epoch, and steps of the run, so far.
        nonfinite_count: steps of the epoch, as far as they were read, that were skipped as bad.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module] | None,
        opt_class: Any,
        hparams: dict[str, Any] | None,
        run_opts: Any,
        checkpointer: Any,
    ) -> None:
        options = declared_options(hparams, run_opts)
        placement = resolve(options.get("device"), options.get("precision", "fp32"))
        eval_precision = options.get("eval_precision", "fp32")
        check_precision(placement.device.type, eval_precision, key="eval_precision")
        evaluation = Placement(placement.device, eval_precision)
        options["device"] = str(placement.device)
        options.setdefault("find_unused_parameters", not self._has_own_step())
        declared = hparams or {}
        check_hooks(type(self), has_own_step=self._has_own_step())
        self._schedule = read_schedule(declared)
        self._freezing = Freezing(declared)
        if opt_class is not None:
            opt_class = with_lr_scale(opt_class, declared)
        values = hparams and dict(hparams.items())  # a copy that reads no key
        super().__init__(modules, opt_class, values, options, checkpointer)
        if hparams is not None:
            self.hparams = KnobAttributes(hparams if isinstance(hparams, Knobs) else Knobs(hparams))
        self.device, self.device_type = placement.device, placement.device.type
        self.training_ctx, self.evaluation_ctx = placement.autocast(), evaluation.autocast()
        self.scaler = placement.grad_scaler()
        if self.scaler.is_enabled() and checkpointer is not None:  # in the place of SpeechBrain's
            checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)
        self._make_step()

    def _make_step(self) -> None:
        """Make what a step consists of besides the modules and their optimizers."""
        self._statistics = RunningStatistics(self.modules)
        self.moving_average = MovingAverage(self.modules, self._declared("ema_decay", 0.0))
        if self.checkpointer is not None and self.moving_average.decay:
            self.checkpointer.add_recoverable("moving_average", self.moving_average)
        self._nonfinite = NonFiniteRecorder(self._run_folder)
        self._counts: Tensor | None = None  # (losses, 2) of the current step, on this rank
        self._bad = torch.zeros((), device=self.device)  # losses of it that are not finite, of all
        graph = ForwardLoss(
            modules=self.modules, forward=self.compute_forward, objectives=self.compute_objectives
        )
        self.ddp_step = DdpStep(graph, self.device, find_unused=self.find_unused_parameters)
        self.step, self.optimizer_step, self.nonfinite_count = 0, 0, 0
        self.epoch_share = 0.0
        self._is_last = False  # micro-batch of its epoch
        self._is_planned = False  # the epoch, by sbkit's sampler

    # -- the step -----------------------------------------------------------------------------

    @property
    def should_step(self) -> bool:
        """Return whether the optimizer steps with this micro-batch: every so many, and the last."""
        return self._is_last or self.step % self.grad_accumulation_factor == 0

    def fit_batch(self, batch: Any) -> Any:
        """Add one micro-batch's gradient, and step when the global batch is complete.

        Returns what `compute_objectives` returned, without its graph; so may a recipe that
        overrides this. `optimizers_step` expects the gradient of a mean.
        """
        batch = self.placed(batch)
        if (self.step - 1) % self.grad_accumulation_factor == 0:  # the first of its step
            self._statistics.save()
        self._set_rate()
        with self._seeded(batch):
            self.on_fit_batch_start(batch, self.should_step)
            with self.no_sync(not self.should_step), explained_memory(batch):
                with self.training_ctx:
                    outputs, objective = self.ddp_step(batch)
                total, counts = self._backward(objective)
        self._counts = counts if self._counts is None else self._counts + counts
        self._nonfinite.record(batch, total)
        if self.should_step:
            self.ddp_step.check_all_used()
            self._normalize()
            self.optimizers_step()
            self.modules.zero_grad(set_to_none=True)  # a frozen optimizer's would add up
        self.on_fit_batch_end(batch, outputs, objective, self.should_step)
        return detached(objective)

    def _set_rate(self) -> None:
        """Set the learning rate if the YAML has `lr_schedule`, from the position in the run."""
        epochs = self._declared("epoch_counter", None)
        if self._schedule is not None:
            progress = (epochs.current - 1 + self.epoch_share) / epochs.limit
            place = (progress, self.optimizer_step + 1, epochs.current)
            factor = self._schedule(*place, self._training_metrics.validations)
            rate = None if self._declared("optimizers", None) else self.hparams.lr
            set_rate(self._active_optimizers().values(), factor, rate)

    def _seeded(self, batch: Any) -> AbstractContextManager[None]:
        """Seed random numbers from the position in the run, if sbkit's sampler plans the batches.

        So a resumed run draws the same. Seeds `draw_uniform` by utterance, and torch by rank.
        """
        if not self._is_planned:
            return seeded_draws([])
        seed, epoch = self.hparams.seed, self._declared("epoch_counter", None).current
        seed_step(seed, epoch=epoch, step=self.step)
        step = (self.step - 1) // self.grad_accumulation_factor
        return seeded_draws(ids_of(batch), seed=seed, epoch=epoch, step=step)

    def set_highest_rate(self) -> float:
        """Set and return the highest rate of the schedule, as far as 10,000 steps have it."""
        optimizers = [*self._active_optimizers().values()]
        places = [(number / 20, 1 + 500 * number, 1, ()) for number in range(21)]
        factor = max(self._schedule(*place) for place in places) if self._schedule else 1.0
        set_rate(optimizers, factor, None)
        return float(max(group["lr"] for each in optimizers for group in each.param_groups))

    def _backward(self, objective: Any) -> tuple[Tensor, Tensor]:
        """Add the gradient of a micro-batch to those of the step, of each loss to its own parts.

        Returns the sum of all losses, (), and for each of them its labels and whether it is not
        finite, (losses, 2).
        """
        losses = self._losses_of(objective)
        totals = [loss.sums.sum() for loss in losses.values()]
        for number, (name, total) in enumerate(zip(losses, totals, strict=True), 1):
            parameters = None
            if isinstance(objective, Mapping):
                groups = self.optimizers_dict[name].param_groups
                parameters = [p for group in groups for p in group["params"] if p.requires_grad]
                if not parameters:  # all frozen for a time
                    continue
            torch.autograd.backward(
                self.scaler.scale(total), inputs=parameters, retain_graph=number < len(totals)
            )
        counts = [
            torch.stack([loss.counts.sum(), ~total.isfinite()]).to(torch.float32)
            for loss, total in zip(losses.values(), totals, strict=True)
        ]
        return reduce(torch.add, totals), torch.stack(counts)

    def _losses_of(self, objective: Any) -> dict[str, Loss]:
        """Return the losses by name, several in the order of their optimizers."""
        losses, optimizers = as_losses(objective), [*(self.optimizers_dict or {})]
        if not isinstance(objective, Mapping):
            return losses
        if losses.keys() != {*optimizers}:
            raise SbkitError(
                "`compute_objectives` must return one Loss, or one for each of `optimizers` "
                f"({', '.join(optimizers)}), but returned {', '.join(losses)}. Correct the names."
            )
        return {name: losses[name] for name in optimizers}

    def _normalize(self) -> None:
        """Turn the gradient of each sum into that of its mean over all labels of all ranks.

        DDP has averaged over the ranks what is to be summed, hence the world size. Where any rank's
        loss was not finite every rank's gradient becomes NaN, so that they skip the step together.
        """
        assert self._counts is not None
        labels, bad = sum_over_ranks(self._counts.clone()).unbind(1)  # (losses,)
        self._counts, self._bad = None, bad.sum()
        factors = torch.where(self._bad > 0, torch.nan, world_size() / labels.clamp(min=1))
        names = [*(self.optimizers_dict or {})]
        for name, optimizer in self._active_optimizers().items():
            factor = factors[names.index(name) if len(factors) > 1 else 0]
            grads = [each.grad for each in with_gradient(optimizer) if each.grad is not None]
            if any(each.is_sparse for each in grads):
                raise SbkitError(
                    "Gradients must be dense, to be divided and clipped, but those of an embedding "
                    "are sparse. Take `sparse=True` out of it."
                )
            if grads:
                multiply_gradients(grads, factor.to(grads[0].device))

    def optimizers_step(self) -> None:
        """Step every optimizer, or none where a loss or a gradient is not finite."""
        optimizers = self._active_optimizers().values()
        if not optimizers:
            return
        # Those without a gradient are left out: a GradScaler refuses them, and torch has the norm
        # of no gradient on the CPU, whatever the device.
        stepping = [each for each in optimizers if any(True for _ in with_gradient(each))]
        for optimizer in stepping:
            self.scaler.unscale_(optimizer)
        norms = [clip(each, self.max_grad_norm) for each in stepping]
        skipped = ~torch.stack([torch.zeros_like(self._bad), *norms]).isfinite().all()
        for optimizer in stepping:
            step_unless(skipped, optimizer, self.scaler)
        self._statistics.restore(skipped)
        self.scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        self.moving_average.update(self.optimizer_step, skipped)
        self._nonfinite.end_step(self.optimizer_step, torch.stack([self._bad, skipped]))
        if self.device_type == "cpu":  # nothing to wait for, and the weights are still the step's
            self._read_skipped()

    def _read_skipped(self) -> None:
        """Read which steps were skipped; raises SbkitError where too many of them were bad."""
        skipped, bad = self._nonfinite.flush(overflow_is_usual=self.scaler.is_enabled())
        self.nonfinite_count += bad
        self._nonfinite.check_count(self.nonfinite_count, self.nonfinite_patience)
        self._training_metrics.meter.skipped += skipped

    # -- what it consists of ------------------------------------------------------------------

    def init_optimizers(self) -> None:
        """Make the optimizers that the YAML declares: one by `opt_class`, or several."""
        declared = self._declared("optimizers", None)
        if not declared:
            super().init_optimizers()
            return
        if self.opt_class is not None:
            raise SbkitError(
                "A YAML must declare `opt_class` or `optimizers`, but has both. Remove one of them."
            )
        self.optimizers_dict = make_optimizers(
            declared,
            named_parameters(self.modules, self.hparams.knobs),
            self.hparams.knobs,
            remove_vector_weight_decay=self.remove_vector_weight_decay,
        )
        for name, optimizer in self.optimizers_dict.items() if self.checkpointer else ():
            self.checkpointer.add_recoverable(f"optimizer_{name}", optimizer)

    def _active_optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers that step now, by name; `init_optimizers` may make none."""
        if self.optimizers_dict is not None:
            return dict(self.freeze_optimizers(self.optimizers_dict))
        return {} if self.opt_class is None else {"opt_class": self.optimizer}

    def train_mode(self) -> None:
        """Put the modules into training mode, but what is frozen into that of evaluation."""
        self.moving_average.apply(False)
        self.modules.train()
        self._freezing.set_mode()

    def freeze_parts(self) -> None:
        """Freeze and unfreeze for the coming step; the ranks then share what learns in it."""
        if self._freezing.advance(self.optimizer_step):
            self.train_mode()
            self.ddp_step.renew(self.inactive)

    def placed(self, batch: Any) -> Any:
        """Return a batch on the device of the model."""
        return batch.to(self.device) if hasattr(batch, "to") else batch

    def _declared(self, name: str, default: Any) -> Any:
        return getattr(getattr(self, "hparams", None), name, default)

    @property
    def _run_folder(self) -> Path | None:
        folder = self._declared("output_folder", None)
        return None if folder is None else Path(folder)

    def _compile(self) -> None:
        """Compile the blocks of the model where `compile` says so."""
        if self.compile:
            compile_blocks(self.modules.values(), self.device)

    # -- several processes --------------------------------------------------------------------

    def _wrap_distributed(self) -> None:
        """Wrap every module for a recipe with a `fit_batch` of its own; else `share_step` does."""
        if self._has_own_step() and world_size() > 1:
            self.distributed_backend = dist.get_backend()
            super()._wrap_distributed()

    def share_step(self) -> None:
        """Share the step among the ranks, once it has the weights that it begins with."""
        if world_size() > 1 and not self.ddp_step.is_shared and not self._has_own_step():
            self.ddp_step.share(self.inactive)

    def _unwrap_distributed(self) -> None:
        """Drop the reducers."""
        self.ddp_step.unwrap()
        for name, module in self.modules.items():
            if isinstance(module, DistributedDataParallel):
                self.modules[name] = module.module

    def _has_own_step(self) -> bool:
        return type(self).fit_batch is not StepBrain.fit_batch

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        """Leave gradients on this rank while a batch is still being accumulated."""
        if use and self.ddp_step.is_shared:
            return self.ddp_step.no_sync()
        context: AbstractContextManager[None] = super().no_sync(use)
        return context


def as_losses(objective: Any) -> dict[str, Loss]:
    """Return the losses of `compute_objectives` by name, a single one as `loss`.

    A mean is the loss of one label. Raises SbkitError for what is none.
    """
    if isinstance(objective, Mapping) and objective:
        return {name: as_loss(each) for name, each in objective.items()}
    if isinstance(objective, Loss):
        return {ONLY: objective}
    if not isinstance(objective, Tensor) or objective.numel() != 1:
        raise SbkitError(
            "`compute_objectives` must return a sbkit.models.loss.Loss, a mean as a tensor of one "
            f"number, or one of them for each of `optimizers`, but returned {objective!r:.100}. "
            "Correct it."
        )
    return {ONLY: Loss(objective.reshape(1), torch.ones(1, device=objective.device))}


def as_loss(objective: Any) -> Loss:
    """Return the loss that is logged and judged: of several the first."""
    return next(iter(as_losses(objective).values()))


def detached(objective: Any) -> Any:
    """Return what `compute_objectives` returned without its graph."""
    if isinstance(objective, Mapping):
        return {name: each.detach() for name, each in objective.items()}
    return objective.detach()


def training_loss(brain: Any, batch: Any) -> Loss:
    """Compute a Brain's loss of a batch as in training, on this process alone."""
    with brain.training_ctx:
        outputs = brain.compute_forward(batch, Stage.TRAIN)
        return as_loss(brain.compute_objectives(outputs, batch, Stage.TRAIN))
