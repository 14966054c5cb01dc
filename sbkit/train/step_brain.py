"""The half of a Brain that takes one training step, from a batch to new weights.

SpeechBrain's hooks of a step keep their names and order. What the step is made of has files of its
own: forward, loss and DDP in `step`, gradients and the optimizer in `optimizer_step`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import speechbrain as sb
import torch.distributed as dist
from speechbrain.utils.run_opts import RunOptions
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.rng import seed_step
from sbkit.config.knobs import KnobAttributes
from sbkit.config.ranges import refuse_out_of_range
from sbkit.data.batches.batch import Batch
from sbkit.distributed.device import Placement, check_precision, resolve
from sbkit.distributed.ranks import world_size
from sbkit.logs.log import say
from sbkit.train.accumulation import Accumulation
from sbkit.train.compiling import compile_blocks
from sbkit.train.cost import CostRecorder
from sbkit.train.freeze import Frozen, with_lr_scale
from sbkit.train.optimizer_step import OptimizerStep
from sbkit.train.schedule import require_schedule, set_rate
from sbkit.train.scoring import Scoring
from sbkit.train.step import DdpStep, ForwardLoss

OLD_PRECISIONS = {"auto_mix_prec": "fp16", "bfloat16_mix_prec": "bf16"}
WITHOUT_EFFECT = {  # SpeechBrain's run options that sbkit refuses, and what to do instead
    "data_parallel_backend": "Start one process per device with torchrun",
    "profile_training": "Set profile: True",
    **dict.fromkeys(("jit", "jit_module_keys"), "Set compile: True"),
    **dict.fromkeys(
        ("compile_mode", "compile_using_fullgraph", "compile_using_dynamic_shape_tracing"),
        "Blocks are compiled for any shape, and for the losses of an uncompiled run",
    ),
}


UNCALLED = {  # hooks of SpeechBrain that have no effect here, and what to do instead
    "update_average": "Return what is to be averaged from `fit_batch` and `evaluate_batch`",
    "_should_save_intra_epoch_ckpt": "Set ckpt_interval_minutes or ckpt_interval_steps",
}
UNCALLED_BY_STEP = dict.fromkeys(  # unless a `fit_batch` of the recipe's own calls them
    ("check_loss_isfinite", "check_gradients"),
    "Call it in a `fit_batch` of your own; here steps that are not finite are skipped",
)
PLAIN = (bool, int, float, str, list)  # an object is one of the recipe's own


def refuse_uncalled(kind: type[sb.Brain]) -> None:
    """Refuse a recipe that overrides what nobody calls.

    Raises SbkitError.
    """
    has_own_step = kind.fit_batch is not StepBrain.fit_batch
    for name, instead in {**UNCALLED, **({} if has_own_step else UNCALLED_BY_STEP)}.items():
        if getattr(kind, name) is not getattr(sb.Brain, name):
            raise SbkitError(
                f"`{name}` must be SpeechBrain's, because sbkit does not call it, but "
                f"{kind.__name__} overrides it. {instead}."
            )


def refuse_unmade(modules: Mapping[str, nn.Module]) -> None:
    """Refuse parameters without values: those of lazy modules, and those on the device `meta`.

    Raises SbkitError.
    """
    for name, each in nn.ModuleDict(modules).named_parameters():
        if isinstance(each, UninitializedParameter) or each.is_meta:
            what = "lies on the device meta" if each.is_meta else "is of a lazy module"
            raise SbkitError(
                f"Every parameter must have its size and values before training, but `{name}` "
                f"{what}. Make it with its sizes in `__init__`, on the CPU."
            )


class StepBrain(Scoring, sb.Brain):  # type: ignore[misc]
    """Train what a recipe defines, one step at a time.

    `device` may be a string or a torch.device; only its type reaches autocast and GradScaler.
    Raises SbkitError when device and precision do not go together here, or a parameter has no
    values yet.

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
        declared = hparams or {}
        refuse_unmade(modules or {})
        refuse_uncalled(type(self))
        require_schedule(declared)
        self._frozen = Frozen(declared.get("freeze") or (), declared)
        opt_class = with_lr_scale(opt_class, declared.get("lr_scale") or {}, declared)
        super().__init__(modules, opt_class, hparams, options, checkpointer)
        if hparams is not None:
            self.hparams = KnobAttributes(**hparams)
        self.device, self.device_type = placement.device, placement.device.type
        self.training_ctx, self.evaluation_ctx = placement.autocast(), evaluation.autocast()
        self.scaler = placement.grad_scaler()
        if self.scaler.is_enabled() and checkpointer is not None:  # in the place of SpeechBrain's
            checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)
        self._cost = CostRecorder(self.modules, self.device)
        self._global_step = OptimizerStep(self.modules, self.device, self._run_folder)
        graph = ForwardLoss(
            modules=self.modules, forward=self.compute_forward, objectives=self.compute_objectives
        )
        self.ddp_step = DdpStep(
            graph, self.device, find_unused_parameters=self.find_unused_parameters
        )
        self._accumulation = Accumulation(self)
        self.step, self.optimizer_step, self.nonfinite_count = 0, 0, 0
        self.epoch_share = 0.0
        self._is_last = False  # micro-batch of its epoch
        self._is_planned = False  # the epoch, by sbkit's sampler

    @property
    def should_step(self) -> bool:
        """Return whether the optimizer steps with this micro-batch: every so many, and the last."""
        return self._is_last or self.step % self.grad_accumulation_factor == 0

    def fit_batch(self, batch: Any) -> Any:
        """Add one micro-batch's gradient, and step when the batch of the optimizer is whole.

        Returns what `compute_objectives` returned, a Loss or a mean, without its graph; so may a
        recipe that overrides this. `optimizers_step` expects the gradient of a mean. A batch that
        does not fit into memory is split; the outputs that `on_fit_batch_end` sees are then those
        of its last piece.
        """
        placed = self.placed(batch)
        if (self.step - 1) % self.grad_accumulation_factor == 0:  # the first of its step
            self._global_step.begin()
            self._accumulation.begin()
        self._begin_step(placed)
        self.on_fit_batch_start(placed, self.should_step)
        computed = self._accumulation.add(placed)
        if self.should_step:
            self.ddp_step.share_first(placed, resting=self.resting)
            self._global_step.normalize(self._active_optimizers())
            self.optimizers_step()
            self.modules.zero_grad(set_to_none=True)  # a frozen optimizer's would pile up
        self._cost.end_step()
        self.on_fit_batch_end(placed, computed.outputs, computed.objective, self.should_step)
        return computed.objective.detach()

    def train_mode(self) -> None:
        """Put the modules into training mode, but what is frozen into that of evaluation."""
        self.modules.train()
        self._frozen.eval()

    def _begin_step(self, batch: Any) -> None:
        """Set the rate and the seed from the place in the run: a resumed run needs nothing else.

        The rate where the YAML has `lr_schedule`, a function of the progress of the run; the seed
        where sbkit's sampler plans the batches.
        """
        epochs = self._declared("epoch_counter", None)
        schedule = self._declared("lr_schedule", None)
        if schedule is not None:
            progress = (epochs.current - 1 + self.epoch_share) / epochs.limit
            set_rate(self._active_optimizers(), self.hparams.lr * schedule(progress))
        if self._is_planned:
            seed_step(self.hparams.seed, epoch=epochs.current, step=self.step)
        self._cost.begin_step(batch.audio.numel() if isinstance(batch, Batch) else 0)

    def optimizers_step(self) -> None:
        """Step the optimizers, unless the gradient is not finite."""
        optimizers = self._active_optimizers()
        if not optimizers:
            return
        self._global_step.take(
            optimizers,
            self.scaler,
            max_grad_norm=self.max_grad_norm,
            number=self.optimizer_step + 1,
        )
        self.optimizer_step += 1
        if self.device_type == "cpu":  # nothing to wait for, and the weights are still the step's
            self._read_skipped()

    def _read_skipped(self) -> None:
        bad_before, patience = self.nonfinite_count, self.nonfinite_patience
        skipped, bad = self._global_step.read(bad_before, patience, self.scaler)
        self.nonfinite_count += bad
        self._training_metrics.meter.skipped += skipped

    def _active_optimizers(self) -> list[Optimizer]:
        """List the optimizers that step now: `init_optimizers` makes several, one, or none."""
        if self.optimizers_dict is not None:
            return list(self.freeze_optimizers(self.optimizers_dict).values())
        return [self.optimizer] if self.opt_class is not None else []

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
        """Compile the blocks of the model where `compile` says so, in place.

        Not as SpeechBrain has it, a compiled wrapper for each of the Brain's modules: nobody calls
        a ModuleList.
        """
        chosen = self.compile_module_keys or list(self.modules)
        unknown = [key for key in chosen if key not in self.modules]
        if unknown or (self.compile_module_keys and not self.compile):
            raise SbkitError(
                f"`compile_module_keys` must name modules of the Brain ({', '.join(self.modules)}) "
                f"and go with compile: True, but is {', '.join(chosen)} with compile: "
                f"{bool(self.compile)}. Correct it, or leave it out."
            )
        if self.compile:
            counts = compile_blocks((self.modules[key] for key in chosen), self.device)
            named = ", ".join(f"{count} {name}" for name, count in counts.items())
            say(f"compiling {named or 'nothing'}")

    # -- several processes -----------------------------------------------------------------------

    def _wrap_distributed(self) -> None:
        """Wrap every module for a recipe with a `fit_batch` of its own; else `wrap_step` does."""
        if self._has_own_step() and world_size() > 1:
            self.distributed_backend = dist.get_backend()
            super()._wrap_distributed()

    def wrap_step(self) -> None:
        """Share the step among the ranks, once it has the weights that it begins with."""
        if world_size() > 1 and not self.ddp_step.is_wrapped and not self._has_own_step():
            self.ddp_step.wrap()

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
        if use and self.ddp_step.is_wrapped:
            return self.ddp_step.no_sync()
        context: AbstractContextManager[None] = super().no_sync(use)
        return context


def declared_options(hparams: dict[str, Any] | None, run_opts: Any) -> dict[str, Any]:
    """Collect the declared options.

    Raises SbkitError for one that has no effect here, and for a number out of its range.
    """
    if isinstance(run_opts, RunOptions):
        given = {name: run_opts[name] for name in run_opts.overridden_args}
    else:
        given = dict(run_opts or {})
    known = RunOptions().as_dict()
    declared = hparams or {}
    options = {**{name: declared[name] for name in known if name in declared}, **given}
    plain = {name: each for name, each in declared.items() if isinstance(each, PLAIN)}
    refuse_out_of_range({**plain, **options})
    for name, instead in WITHOUT_EFFECT.items():
        if options.get(name):
            raise SbkitError(f"`{name}` must be off, but is {options[name]}. {instead}.")
    for name, precision in OLD_PRECISIONS.items():
        if options.get(name):
            options["precision"] = precision
    return options
