"""The training loop: SpeechBrain's Brain with its hooks, and with exact steps.

A recipe overrides `compute_forward` and `compute_objectives`, and as much of `on_stage_start`,
`on_stage_end` and `on_fit_batch_start` as it needs. `compute_objectives` returns a `Loss` of sums
and counts, or a plain mean as in SpeechBrain.

    fit -> on_fit_start (SpeechBrain's: `init_optimizers`, then the last checkpoint is loaded)
        -> _fit_epochs -> _fit_train -> set_scheduled_rate
                                     -> fit_batch -> DdpStep (the recipe's methods)
                                                  -> optimizers_step -> TrainingStep.update
                                     -> _validate_if_due (`valid_interval_steps`)
                       -> _fit_valid -> evaluate_splits -> evaluate_batch
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import speechbrain as sb
import torch
import torch.distributed as dist
import yaml
from speechbrain import Stage
from speechbrain.dataio.dataloader import LoopedLoader
from speechbrain.utils.checkpoints import Checkpointer as SpeechBrainCheckpointer
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from speechbrain.utils.run_opts import RunOptions
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from sbkit.audio.random_draws import seeded_draws
from sbkit.base.errors import BundleError, ConfigError, StopRequestedError, translate
from sbkit.base.machine import warn_of_unused_gpu
from sbkit.base.stores import store_patience
from sbkit.bundle.config import BundleConfig
from sbkit.bundle.task import Task, mean_loss
from sbkit.checkpoint.checkpointer import (
    NORMALIZER,
    PARTS,
    RANKED_BY,
    AveragedCheckpoints,
    Checkpointer,
)
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.rng import (
    RandomState,
    isolated_rng,
    random_state,
    restore_random_state,
    seed_torch,
)
from sbkit.config.hparams import RECIPE, SettingAttributes, Settings
from sbkit.config.keys import with_defaults
from sbkit.data.batch import Batch, Loaders
from sbkit.data.sampler import RankSampler
from sbkit.distributed.device import Placement, check_precision, resolve_placement
from sbkit.distributed.ranks import (
    gather_over_ranks,
    raise_on_all_ranks,
    rank,
    world_size,
)
from sbkit.logs.metric import LOSS_METRIC, Metrics, best_key, describe_values
from sbkit.logs.progress import TrainingProgress, progress_bar, reporting
from sbkit.logs.run_log import Record
from sbkit.models.compiling import compile_blocks
from sbkit.models.layers import GlobalNorm
from sbkit.models.loss import Amount, Loss
from sbkit.text.normalization import TextTable, language_table, table_from_stored
from sbkit.train.evaluation import Evaluator, length_of, mean_over_ranks
from sbkit.train.metrics import TrainingMetrics
from sbkit.train.model_state import (
    ComputeFeatures,
    agree_on_buffers,
    measure_normalization,
)
from sbkit.train.nonfinite import ids_of, memory_errors
from sbkit.train.optimizers import (
    Freezing,
    OptimizerClass,
    make_optimizers,
    named_parameters,
    naming_parameters,
    with_rates,
)
from sbkit.train.ownership import OwnerCheck, all_within, device_errors, prepare_helpers
from sbkit.train.run_options import check_hooks, read_run_options
from sbkit.train.schedule import Position, parse_schedule, set_rate
from sbkit.train.step import Objective, TrainingStep, as_loss, as_losses, detached
from sbkit.train.stopping import (
    FIT_SECONDS,
    STALE_VALIDATIONS,
    EpochSaver,
    TimeLimit,
)
from sbkit.train.watchdog import Watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")
Batches = Iterable[Any]  # a loader
SplitLoaders = Mapping[str, Batches]  # by the name of the split
LoaderOptions = Mapping[str, Any] | None

COUNTERS = ("step", "optimizer_step", "nonfinite_count")
PHASES = {  # titles of the progress bar
    "valid": "validating",
    "test": "testing",
    "averaging": "averaging checkpoints",
    "measure": "measuring features",
}


class ResumedPosition(NamedTuple):
    """The position in a checkpoint, until the resumed epoch continues."""

    random: RandomState | None = None  # the state of the generators
    accumulation: int | None = None  # micro-batches of a step
    is_trained: bool = False  # whether the epoch had its last micro-batch


@register_checkpoint_hooks
class Brain(sb.Brain):  # type: ignore[misc]
    """Train and validate a recipe's model; takes the arguments of SpeechBrain's Brain.

    `device` may be a string or a torch.device; only its type reaches autocast and GradScaler.

    Attributes:
        parts, optional_parts: YAML keys of the parts of the `network`; a YAML may leave out the
            optional ones. A Brain without parts sets its `network` itself.
        helpers: names of frozen modules beside the model, such as a teacher: attributes of the
            Brain, or objects of the YAML. sbkit moves them to the device, in evaluation mode. They
            are in no optimizer, checkpoint or bundle; a run is resumed only with the same ones.
        network: the model that bundles of a run contain, of the task's `model_class`.
        metrics: the metrics that `measure` computes; the first one ranks checkpoints. Without any
            it is the loss. They belong to the class: an instance may have a SpeechBrain recipe's
            own attribute of that name.
        evaluates_segments: whether a recording longer than `eval_batch_seconds` is evaluated in
            segments.
        loaders: loaders of the run, if `Run.make_brain` made the Brain.
        epoch_share: share of the current epoch before the current optimizer step.
        step: SpeechBrain's name for the micro-batches of the current epoch or evaluation so far; 0
            in between. A resumed epoch continues from where it was saved.
        optimizer_step: optimizer steps of the run so far.
        nonfinite_count: bad steps of the epoch that the host has read so far.
        on_epoch: takes the record of each validation that `run.history` gets, on the first rank.
        tested: the meta data of the checkpoints whose mean is tested, once it is loaded.

    >>> class Line(Brain):
    ...     def compute_forward(self, batch, stage):
    ...         return self.modules.line(batch)
    ...     def compute_objectives(self, predictions, batch, stage):
    ...         return (predictions - 1).square().mean()
    >>> brain = Line({"line": nn.Linear(1, 1)}, lambda p: torch.optim.SGD(p, lr=0.1))
    >>> brain.fit(range(2), DataLoader(torch.ones(8, 1), batch_size=4))
    >>> brain.optimizer_step
    4
    """

    parts: ClassVar[tuple[str, ...]] = ()
    optional_parts: ClassVar[tuple[str, ...]] = ()
    helpers: ClassVar[tuple[str, ...]] = ()
    network: Any = None
    task: Task | None = None
    metrics: ClassVar[Metrics] = {}
    evaluates_segments: ClassVar[bool] = False
    loaders: Loaders | None = None
    on_epoch: Callable[[Record], object] | None = None
    tested: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        modules: dict[str, nn.Module] | None = None,
        opt_class: OptimizerClass | None = None,
        hparams: Mapping[str, object] | None = None,
        run_opts: RunOptions | Mapping[str, object] | None = None,
        checkpointer: SpeechBrainCheckpointer | None = None,
    ) -> None:
        """Make the modules, the network, the step and the evaluation.

        Args:
            modules: by name, as attributes of `self.modules`. They are moved to the device.
            opt_class: makes the optimizer from the parameters; None for a Brain that only
                evaluates, or makes its optimizers in `init_optimizers`.
            hparams: the values of the YAML, as attributes of `self.hparams`; `recipe` may be the
                task: what the model predicts, and how it is scored.
            run_opts: such as `{"device": "cuda:0", "precision": "bf16"}`; they replace `hparams`.
            checkpointer: saves each epoch; None to save nothing.
        """
        settings = hparams if isinstance(hparams, Settings) else Settings(hparams or {})
        # `hparams` lacks the defaults: recipes of SpeechBrain ask which keys it has.
        declared = self.settings = with_defaults(settings)
        options = read_run_options(settings, run_opts)
        precision = options.get("precision", declared["precision"])
        placement = resolve_placement(options.get("device"), precision)
        if options.get("device") is None and placement.device.type == "cpu":
            warn_of_unused_gpu("torch")
        eval_precision = options.get("eval_precision", declared["eval_precision"])
        check_precision(placement.device.type, eval_precision, key="eval_precision")
        options["device"] = str(placement.device)
        options.setdefault("find_unused_parameters", not has_own_step(self))
        check_hooks(type(self), has_own_step=has_own_step(self))
        ranking = best_key(type(self).metrics or LOSS_METRIC)
        self.schedule = parse_schedule(
            settings, opt_class, higher_is_better=ranking.max_key is not None
        )
        freezing = Freezing(settings)
        if opt_class is not None:
            opt_class = with_rates(opt_class, settings)
        # SpeechBrain would log a line for each option that it gets twice.
        values = {name: value for name, value in settings.items() if name not in options}
        super().__init__(modules, opt_class, values, options, checkpointer)
        self.hparams = SettingAttributes(settings)
        self.device = placement.device
        self.device_type = placement.device.type
        self.training_ctx = placement.autocast()
        self.evaluation_ctx = Placement(placement.device, eval_precision).autocast()
        self.scaler = placement.grad_scaler()
        self.training_step = TrainingStep(
            self.modules,
            self.compute_forward,
            self.compute_objectives,
            device=self.device,
            freezing=freezing,
            find_unused=self.find_unused_parameters,
            ema_decay=declared["ema_decay"],
        )
        self.training_metrics = TrainingMetrics(self.device)
        interval = declared["valid_interval_steps"]
        metrics = type(self).metrics or LOSS_METRIC
        self.evaluator = Evaluator(metrics, self.measure, interval=interval)
        self.stopping = EpochSaver(
            None if checkpointer is None else self._save_intra_epoch_ckpt,
            minutes=self.ckpt_interval_minutes,
            steps=self.ckpt_interval_steps,
            max_steps=self.optimizer_step_limit,
            time_limit=TimeLimit(declared["max_minutes"]),
        )
        self.owners = OwnerCheck(self)
        self.watchdog = Watchdog(None, seconds=0)
        if checkpointer is not None and self.scaler.is_enabled():  # instead of SpeechBrain's
            checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)
        if interval and not isinstance(checkpointer, Checkpointer | None):
            raise ConfigError(
                "`valid_interval_steps` needs the checkpointer sbkit.Checkpointer.",
                keys=("valid_interval_steps",),
            )
        if checkpointer is not None and self.training_step.moving_average.decay:
            checkpointer.add_recoverable("moving_average", self.training_step.moving_average)
        self.step, self.optimizer_step, self.nonfinite_count = 0, 0, 0
        self.epoch_share = 0.0
        self._is_last = False  # whether the micro-batch is the last of its epoch
        self._resumed = ResumedPosition()
        self.task = recipe if isinstance(recipe := settings.get(RECIPE), Task) else None
        if type(self).parts:
            self.network = self.make_model()

    def make_model(self) -> Any:
        """Build the model of the task from the declared parts, on the device."""
        settings, task = self.hparams.settings, self.task
        if task is None:
            raise ConfigError(
                f"{type(self).__name__} declares `parts`, so its `hparams` need the task as "
                f"`{RECIPE}`, such as AsrRecipe()."
            )
        optional = [name for name in self.optional_parts if settings.get(name) is not None]
        parts = {name: settings[name] for name in (*self.parts, *optional)}
        if isinstance(self.checkpointer, Checkpointer):
            self.checkpointer.meta[PARTS] = [*parts]  # for an export, which runs no code
        for part in parts.values():  # `model` may lack the features
            if isinstance(part, nn.Module):
                part.to(self.device)
        labels = task.model_arguments(settings.get(task.label_key))
        kind = task.model_class()

        def describe(error: Exception) -> str:
            return (
                f"{kind.__name__} cannot be made of {', '.join(parts)} ({type(error).__name__}: "
                f"{error}). Name the YAML keys that it takes in `parts` of {type(self).__name__}."
            )

        with translate((KeyError, TypeError, AttributeError), ConfigError, describe):
            return kind(model=self.modules["model"], **parts, **labels)

    @property
    def run_folder(self) -> Path | None:
        """The folder that the run writes to; None for a recipe without `output_folder`."""
        folder = getattr(self.hparams, "output_folder", None)
        return None if folder is None else Path(folder)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and the optimizer step; zeros until the last checkpoint is loaded."""
        return self.hparams.epoch_counter.current, self.optimizer_step

    # ---- the run

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: object,
        valid_set: object = None,
        progressbar: bool | None = None,
        train_loader_kwargs: LoaderOptions = None,
        valid_loader_kwargs: LoaderOptions = None,
    ) -> None:
        """Train and validate epoch after epoch, from the last checkpoint on.

        ``valid_set`` is one set, or several by their names. As in SpeechBrain nothing is returned:
        `run.history` has the figures, and the Brain has the last weights.

        Raises StopRequestedError, a KeyboardInterrupt, after a signal. The step is finished, and
        saved if there is a checkpointer; the next `fit` goes on.
        """
        if self.test_only:
            return
        loader = as_loaders(self, train_set, Stage.TRAIN, train_loader_kwargs)["train"]
        valid_loaders = None
        if valid_set is not None:
            valid_loaders = as_loaders(self, valid_set, Stage.VALID, valid_loader_kwargs)
            self.evaluator.loaders = valid_loaders
        show_progress = not self.noprogressbar if progressbar is None else progressbar
        # A run, whose Brain `make_brain` gave its loaders, seeds the global generators at each
        # step. A SpeechBrain recipe draws from them as they are.
        has_own_numbers = self.loaders is not None
        if has_own_numbers and epoch_counter is not self.hparams.epoch_counter:
            raise ConfigError(
                "`epoch_counter` must be `brain.hparams.epoch_counter`; set its `limit`."
            )
        checkpointer = self.checkpointer
        try:
            with (
                isolated_rng(self.device) if has_own_numbers else nullcontext(),
                watching(self),
                checkpointer.claimed() if isinstance(checkpointer, Checkpointer) else nullcontext(),
            ):
                self.on_fit_start()  # nothing is trained yet, so a signal ends it at once
                if self.step == 0:
                    restore_random_state(self._resumed.random, self.device)
                self.stopping.time_limit.start()
                open_metrics(self, epoch_counter, loader)
                for _, part in all_within(self):
                    if isinstance(part, nn.Parameter):
                        part.grad = None  # gradients from before must not count
                self.owners.begin()
                with self.stopping.signals, register_optimizer_step_pre_hook(self.owners.check):
                    self._fit_epochs(epoch_counter, loader, valid_loaders, show_progress)
                    self.training_step.moving_average.swap_in()
                    self.stop_if_signaled(in_training=True)  # a signal in the last validation
        finally:
            self.stopping.time_limit.stop()
            self.step = 0  # without a checkpoint, the next `fit` starts an epoch
            self.training_metrics.close()
            self.training_step.ddp.unwrap()

    def _fit_epochs(
        self,
        epoch_counter: Iterable[int],
        train_set: Batches,
        valid_set: SplitLoaders | None,
        show_progress: bool,
    ) -> None:
        stopping = self.stopping
        stopping.time_limit.agree()
        trained_epoch: int | None = None
        for epoch in epoch_counter:
            if self._stops_early or (self.step == 0 and stopping.is_over(self.optimizer_step)):
                break
            self._fit_train(train_set, epoch, show_progress)
            trained_epoch = epoch
            if self._stops_early:
                break
            if valid_set is not None:
                stopping.save()  # a run that dies in the validation resumes at the epoch's end
            self.step = 0
            self._fit_valid(valid_set, epoch, show_progress)
            ends_debugging = self.debug and 0 < self.debug_epochs <= epoch
            if stopping.is_over(self.optimizer_step) or ends_debugging:
                break
        if self._stops_early:
            stale = self.evaluator.stale
            logger.info(f"`early_stopping`: {stale} validations were no better; training ends.")
        if valid_set is None or trained_epoch is None or self.evaluator.is_current:
            return
        evaluate_stage(self, valid_set, Stage.VALID, trained_epoch)  # a recipe left it out

    def evaluate(
        self,
        test_set: object,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: LoaderOptions = None,
    ) -> float:
        """Load the best checkpoint, evaluate one set or several by name, and return the mean loss.

        The metrics are those of a validation; `sbkit score` measures a run as it is exported.
        Without a key, checkpoints are ranked by the metric that they were saved with.

        A signal ends it by a StopRequestedError, and nothing is measured.
        """
        loaders = as_loaders(self, test_set, Stage.TEST, test_loader_kwargs)
        with self.guarded():
            self.load_tested_weights(max_key, min_key)
            return evaluate_stage(self, loaders, Stage.TEST, None)

    def load_tested_weights(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the weights that a test measures; without a key, the best of the saved metric."""
        keys: Mapping[str, str | None] = {"max_key": max_key, "min_key": min_key}
        if not (max_key or min_key) and type(self).metrics:
            keys = best_key(type(self).metrics)._asdict()
        elif not (max_key or min_key) and isinstance(self.checkpointer, Checkpointer):
            keys = self.checkpointer.ranked_by()
        self.on_evaluate_start(**keys)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Catch signals and watch for a hang, while other work than `fit` calls `ping`.

        Raises StopRequestedError at the end if a signal came that the work did not obey.
        """
        with self.stopping.signals:
            with watching(self):
                yield
            self.stop_if_signaled()  # not watched: rank 0 may be writing a report

    def ping(self, phase: str, utterances: Sequence[str] = ()) -> bool:
        """Tell the watchdog that work goes on; return whether a signal asks to stop it."""
        self.watchdog.ping(phase, self.optimizer_step, utterances)
        return self.stopping.signals.received is not None

    def stop_if_signaled(self, *, in_training: bool = False) -> None:
        """Raise StopRequestedError if any rank has received a signal; all ranks call this."""
        if not any(gather_over_ranks(self.stopping.signals.received is not None)):
            return
        if in_training:
            self.stopping.leave(self.optimizer_step)
        raise StopRequestedError(
            "Stopped outside of training; the same command or call does the rest."
        )

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the best checkpoint, or the mean of up to `average_checkpoints` of the best.

        The counters of the run stay as they are.
        """
        # Without a checkpoint, its weights are random.
        if self.task is not None and not self.optimizer_step:
            if self.checkpointer is None:
                raise ConfigError(
                    "A Brain must train before it is evaluated, or load a checkpoint, but this one "
                    "has neither trained nor a `checkpointer`. Call `fit`, or pass a checkpointer."
                )
            if newest_checkpoint(Path(self.checkpointer.checkpoints_dir)) is None:
                folder = self.run_folder or self.checkpointer.checkpoints_dir
                raise BundleError(f"{folder} has no checkpoint, so nothing can be tested yet.")
        keys = {"max_key": max_key, "min_key": min_key}
        recoverables = self.checkpointer.recoverables if self.checkpointer else {}
        recoverables.pop("brain", None)
        try:
            best = self.checkpointer and self.checkpointer.recover_if_possible(**keys)
        finally:
            recoverables["brain"] = self
        self.tested = [best.meta] if best else []
        count = int(self.settings["average_checkpoints"])
        if isinstance(self.checkpointer, Checkpointer) and (
            # Otherwise an export would use an earlier choice.
            count > 1 or AveragedCheckpoints.read(self.checkpointer.checkpoints_dir) is not None
        ):
            if self.loaders is not None:
                self.evaluator.loaders = self.loaders.valid
            compute_error = partial(averaging_error, self) if self.evaluator.loaders else None
            averaged = self.checkpointer.load_average(count, compute_error, **keys)
            if averaged is not None:
                saved = self.checkpointer.list_checkpoints()
                self.tested = [c.meta for c in saved if c.path.name in averaged.checkpoints]
                if compute_error is not None:
                    logger.info(str(averaged))

    # ---- an epoch

    def _fit_train(self, train_set: Batches, epoch: int, show_progress: bool) -> None:
        self.evaluator.is_current = False
        self.on_stage_start(Stage.TRAIN, epoch)
        self._start_epoch(train_set, epoch)
        count = length_of(train_set)
        log_every = self.settings["log_every"]
        is_planned = isinstance(getattr(train_set, "batch_sampler", None), RankSampler)
        self._validate_if_due(epoch)  # if the run died in that validation
        for batch, is_last in self._training_batches(train_set):
            if self._stops_early or self.stopping.is_over(self.optimizer_step):
                break
            # Counted in steps, because a schedule must not depend on the accumulation
            factor = self.grad_accumulation_factor
            self.epoch_share = self.step // factor / -(-count // factor) if count else 0.0
            self.watchdog.ping("step", self.optimizer_step, ids_of(batch))
            self.step += 1
            self._is_last = is_last
            steps_before = self.optimizer_step
            # Here, because a recipe's own `fit_batch` must follow the schedule, too, and draw the
            # same numbers after a resume.
            set_scheduled_rate(self)
            with device_errors(self), seeded(self, batch) if is_planned else seeded_draws([]):
                objective = self.fit_batch(batch)
            seconds = batch.seconds if isinstance(batch, Batch) else 0.0
            sources = batch.sources if isinstance(batch, Batch) else None
            self.training_metrics.add(as_losses(objective), seconds, sources)
            if self.optimizer_step > steps_before:
                self.training_step.freeze(self.optimizer_step)
                if self.optimizer_step % log_every == 0:
                    optimizers = active_optimizers(self).values()
                    self._read_metrics()
                    self.training_metrics.log_step(
                        epoch,
                        self.optimizer_step,
                        rate=next((o.param_groups[0]["lr"] for o in optimizers), 0.0),
                        live=show_progress,
                    )
            if self.debug and self.step >= self.debug_batches:
                break
            self.stopping.after_micro_batch(
                self.optimizer_step, ends_step=self.should_step, is_last=is_last
            )
            self._validate_if_due(epoch)
            self.watchdog.ping("data", self.optimizer_step)
        self._read_metrics()
        self.zero_grad(set_to_none=True)
        self.on_stage_end(Stage.TRAIN, self.training_metrics.of_epoch.loss, epoch)
        self.avg_train_loss = 0.0

    @property
    def _stops_early(self) -> bool:
        """Whether a validation has just shown that the last `early_stopping` were no better."""
        patience = self.settings["early_stopping"]
        is_validated = self.evaluator.validated_step == self.optimizer_step
        return is_validated and 0 < patience <= self.evaluator.stale

    def _start_epoch(self, train_set: Batches, epoch: int) -> None:
        self.training_step.start_epoch(epoch)
        prepare_helpers(self)
        self.training_metrics.start_epoch(afresh=self.step == 0)
        if self.step == 0:
            self.nonfinite_count = 0
        self.training_step.freeze(self.optimizer_step)
        self.zero_grad(set_to_none=True)
        sampler = getattr(train_set, "batch_sampler", None)
        if isinstance(sampler, RankSampler):
            if self._resumed.accumulation is not None:  # the same steps, in other micro-batches
                steps = self.step // self._resumed.accumulation
                self.step = steps * self.grad_accumulation_factor
            sampler.set_epoch(epoch, start=self.step)
        elif hasattr(self.train_sampler, "set_epoch"):
            self.train_sampler.set_epoch(epoch)
        if world_size() > 1 and not has_own_step(self) and not self.training_step.ddp.is_shared:
            self.training_step.ddp.share()

    def _training_batches(self, train_set: Batches) -> Iterator[tuple[Any, bool]]:
        """Return the batches left in an epoch, and whether each is the last; measure the waits."""
        batches = iter(train_set)
        if self._resumed.is_trained:  # a loader that saves no position would start again
            next(batches, None)
            batches = iter(())
        if self.step > 0:  # the loader draws when its iterator is made, before the saved state
            restore_random_state(self._resumed.random, self.device)
        self._resumed = ResumedPosition()
        marked = mark_last(batches, count=length_of(train_set), done=self.step)
        return self.training_metrics.meter.timed(marked)

    # ---- a step

    def fit_batch(self, batch: Any) -> Objective:
        """Add one micro-batch's gradient, and step when the global batch is complete.

        Returns the result of `compute_objectives`, without its graph. A recipe may override this,
        and then calls `optimizers_step` with the gradient of a mean.
        """
        batch = self.to_device(batch)
        if (self.step - 1) % self.grad_accumulation_factor == 0:  # the first of its step
            self.training_step.begin()
        self.on_fit_batch_start(batch, self.should_step)
        with self.no_sync(not self.should_step), memory_errors(batch):
            with self.training_ctx:
                outputs, objective = self.training_step.ddp(batch)
            optimizers = self.optimizers_dict or {}
            self.training_step.backward(batch, objective, optimizers, self.scaler)
        if self.should_step:
            self.owners.check()
            self.training_step.normalize(active_optimizers(self))
            self.optimizers_step()
            self.modules.zero_grad(set_to_none=True)  # else gradients of a frozen optimizer add up
        self.on_fit_batch_end(batch, outputs, objective, self.should_step)
        return detached(objective)

    @property
    def should_step(self) -> bool:
        """Whether the optimizer steps after this micro-batch: every few, and after the last."""
        return self._is_last or self.step % self.grad_accumulation_factor == 0

    def optimizers_step(self) -> None:
        """Step every optimizer, or none if a loss or a gradient is not finite."""
        optimizers = active_optimizers(self)
        if not optimizers:
            return
        norms = self.training_step.update(
            optimizers,
            step=self.optimizer_step + 1,
            scaler=self.scaler,
            max_grad_norm=self.max_grad_norm,
        )
        are_several = len(self.optimizers_dict or ()) > 1
        self.training_metrics.log_gradients(norms, self.scaler, by_optimizer=are_several)
        self.evaluator.is_current = False
        self.optimizer_step += 1
        if self.device_type == "cpu":  # the host need not wait, and can stop at the bad step
            self._read_skipped()

    def _read_skipped(self) -> None:
        recorder = self.training_step.nonfinite
        skipped, num_bad = recorder.flush(overflow_is_usual=self.scaler.is_enabled())
        self.nonfinite_count += num_bad
        recorder.check_count(self.nonfinite_count, self.nonfinite_patience)
        self.training_metrics.meter.skipped_steps += skipped

    def to_device(self, batch: Any) -> Any:
        return batch.to(self.device) if hasattr(batch, "to") else batch

    # ---- optimizers and their rate

    def init_optimizers(self) -> None:
        """Make the optimizers that the YAML declares: one by `opt_class`, or several."""
        hparams = self.hparams.settings
        declared = hparams.get("optimizers")
        if declared and self.opt_class is not None:
            raise ConfigError(
                "A YAML must declare `opt_class` or `optimizers`, but has both. To replace that of "
                "a base YAML, write `opt_class: null` or `optimizers: null`.",
                keys=("opt_class",),
            )
        named = named_parameters(self.modules, hparams)
        if declared:
            self.optimizers_dict = make_optimizers(
                declared,
                named,
                hparams,
                remove_vector_weight_decay=self.remove_vector_weight_decay,
            )
            for name, optimizer in self.optimizers_dict.items() if self.checkpointer else ():
                self.checkpointer.add_recoverable(f"optimizer_{name}", optimizer)
        elif self.opt_class is not None:
            with naming_parameters("opt_class", self.opt_class, named):
                super().init_optimizers()
        average = self.training_step.moving_average
        if average.delegate((self.optimizers_dict or {}).values()) and self.checkpointer:
            self.checkpointer.add_recoverable("moving_average", average)

    @property
    def run_share(self) -> float:
        """The share of the run before the current step: the larger of epochs and `max_minutes`."""
        epochs = self.hparams.epoch_counter
        share_of_epochs = (epochs.current - 1 + self.epoch_share) / epochs.limit
        return float(max(share_of_epochs, self.stopping.time_limit.share))

    def _compile(self) -> None:
        if self.compile:
            compile_blocks(self.modules.values())

    # ---- several processes

    def _wrap_distributed(self) -> None:
        """Wrap each module for a recipe with its own `fit_batch`; others share the whole step."""
        if has_own_step(self) and world_size() > 1:
            self.distributed_backend = dist.get_backend()
            super()._wrap_distributed()

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        if use and self.training_step.ddp.is_shared:
            return self.training_step.ddp.no_sync()
        context: AbstractContextManager[None] = super().no_sync(use)
        return context

    # ---- evaluation

    def score(self, outputs: Any, batch: Any) -> Sequence[Any]:
        """Return a result for every utterance of an evaluated batch, as plain data.

        By default, `outputs` are what the network's `predict` returns.
        """
        if self.task is None:
            raise NotImplementedError("a Brain with `metrics` defines `score`")
        labels = self.hparams.settings.get(self.task.label_key)
        return self.results_of(self.task.read_outputs(outputs, labels), batch)

    def results_of(self, predictions: Sequence[Any], batch: Any) -> list[Any]:
        """Return the task's result of each prediction, as a test of the bundle does."""
        assert self.task is not None
        settings, task = self.hparams.settings, self.task
        rate, language = settings["sample_rate"], self.settings["language"]
        config = BundleConfig(
            task.name, rate, (), {}, language=language, normalizer=self.text_table.plain
        )
        pairs = zip(predictions, batch.rows(), strict=True)
        return [task.result(prediction, row, config=config) for prediction, row in pairs]

    @property
    def text_table(self) -> TextTable:
        """The table that normalizes transcripts, which a bundle of this Brain has, too."""
        stored = self.checkpointer and self.checkpointer.meta.get(NORMALIZER)
        if stored:
            return table_from_stored(stored)
        return language_table(str(self.settings["language"]))

    def measure(self, results: Sequence[Any]) -> Mapping[str, float]:
        """Return the value of each of `metrics` over the results of a split."""
        if not type(self).metrics:
            return mean_loss(results)
        if self.task is None:
            raise NotImplementedError("a Brain with `metrics` defines `measure`")
        return self.task.measure(results)

    def _fit_valid(self, valid_set: SplitLoaders | None, epoch: int, show_progress: bool) -> None:
        """Validate; a recipe may override this to do so less often, except after the last epoch."""
        if valid_set is not None:
            evaluate_stage(self, valid_set, Stage.VALID, epoch)

    def _validate_if_due(self, epoch: int) -> None:
        """Validate within an epoch, and save before and after; training then goes on unchanged.

        A run that dies while it validates resumes before the validation.
        """
        is_within_epoch = self.step > 0 and not (self._is_last or self._resumed.is_trained)
        is_due = is_within_epoch and self.should_step and self.evaluator.is_due(self.optimizer_step)
        if not is_due or self.stopping.is_over(self.optimizer_step):
            return
        self._read_metrics()
        self.stopping.save()
        with isolated_rng(self.device):
            evaluate_stage(self, self.evaluator.loaders, Stage.VALID, epoch, micro_batch=self.step)
        self.training_step.train_mode()
        self.training_metrics.start_epoch(afresh=False)

    @torch.no_grad()
    def evaluate_splits(self, loaders: SplitLoaders, stage: Stage, *, phase: str) -> list[Loss]:
        """Return the loss of every batch, and leave the results of each split in the evaluator.

        A signal ends it early. ``phase`` names it for the watchdog and the progress bar.
        """
        self.evaluator.start(loaders)
        self.training_metrics.meter.reset()
        self.modules.eval()
        prepare_helpers(self)
        self.training_step.moving_average.swap_in()
        agree_on_buffers(self.modules)
        losses: list[Loss] = []
        batches = (
            (split, batch)
            for split, loader in loaders.items()
            for batch in islice(self.watched(loader, phase), self.max_evaluated_batches)
        )
        for split, batch in batches:
            if self.stopping.signals.received:
                break
            self.evaluator.enter(split)
            self.step += 1
            with memory_errors(batch, "eval_batch_seconds"), device_errors(self):
                loss = as_loss(self.evaluate_batch(batch, stage))
            self.training_metrics.log_parts(loss)
            losses.append(loss)
            if not type(self).metrics:
                pairs = zip(loss.sums.tolist(), loss.counts.tolist(), strict=True)
                self.evaluator.add(pairs)
        self.step = 0
        return losses

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Return the result of `compute_objectives` for a batch, a Loss or a mean, on the CPU."""
        batch = self.to_device(batch)
        with seeded_draws(ids_of(batch)), self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage=stage)
            objective = self.compute_objectives(outputs, batch, stage=stage)
        if type(self).metrics:
            self.evaluator.add(self.score(outputs, batch))
        return (as_loss(objective) if isinstance(objective, Mapping) else objective).detach().cpu()

    @property
    def max_evaluated_batches(self) -> int | None:
        """The number of batches of a set that `debug` evaluates; None for all."""
        return max(self.debug_batches, 1) if self.debug else None

    def watched(self, batches: Iterable[T], phase: str) -> Iterator[T]:
        """Yield batches outside the training loop; show the progress, and ping the watchdog."""
        with progress_bar(PHASES.get(phase, phase), length_of(batches)) as advance:
            for batch in batches:
                self.watchdog.ping(phase, self.optimizer_step, ids_of(batch))
                yield batch
                advance(1)

    def measure_normalization(self, compute: ComputeFeatures | None) -> None:
        """Measure the training set's features for those GlobalNorms that have no statistics yet.

        A recipe calls this in `on_fit_start`, after the last checkpoint is loaded.
        """
        norms = [m for m in self.modules.modules() if isinstance(m, GlobalNorm) and not m.frames]
        if compute is None or not norms:
            return
        assert self.loaders is not None, "make the Brain by run.make_brain()"
        batches = self.watched(self.loaders.for_statistics, "measure")
        measure_normalization(norms, compute, batches, self.device)

    # ---- after a stage

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Log the metrics of a validation and save the epoch, or log those of a test."""
        if stage is Stage.TEST:
            values = self.evaluator.measure_splits()
            metrics = describe_values(self.evaluator.metrics, {"loss": stage_loss, **values})
            logger.info(f"test: {', '.join(metrics)}")
            if self.task is not None:
                logger.info("note: these are quick metrics, not those of the exported model.")
        elif stage is Stage.VALID:
            end_validation(self, stage_loss, epoch or 0)

    # ---- logs

    def log(self, name: str, total: Amount, count: Amount = 1) -> None:
        """Log a mean by name, from any hook of a step; the host does not wait for the device.

        It is the sum of ``total`` divided by that of ``count``, over all micro-batches and ranks
        since the last logged step, and in the epoch's record over the epoch. Tensors are summed.
        What a validation logs is the mean over its batches, `valid_NAME` in the epoch's record.
        """
        self.training_metrics.log(name, total, count)

    def log_figure(self, name: str, figure: Any) -> None:
        """Write a figure of matplotlib as `figures/NAME-STEP.png` and to TensorBoard.

        Only rank 0 does, and only in `fit` with a run folder.
        """
        self.training_metrics.log_figure(name, self.optimizer_step, figure)

    def _read_metrics(self) -> None:
        self._read_skipped()
        self.training_metrics.read()
        self.avg_train_loss = self.training_metrics.of_epoch.loss

    # ---- checkpoints

    def _save_intra_epoch_ckpt(self) -> None:
        self.watchdog.ping("checkpoint", self.optimizer_step)
        agree_on_buffers(self.modules)  # only one rank's are saved
        self._read_metrics()
        with self.training_step.moving_average.swapped_in():
            super()._save_intra_epoch_ckpt()

    @mark_as_saver  # type: ignore[untyped-decorator]
    def _save(self, path: str | Path) -> None:
        state = {name: getattr(self, name) for name in COUNTERS}
        state["accumulation"] = self.grad_accumulation_factor
        state["is_trained"] = self._is_last and self.step > 0
        state[FIT_SECONDS] = self.stopping.time_limit.seconds
        state |= self.evaluator.state() | self.training_metrics.state()
        state["random"] = random_state(self.device)
        Path(path).write_text(json.dumps(state))

    @mark_as_loader  # type: ignore[untyped-decorator]
    def _recover(self, path: str | Path, end_of_epoch: bool) -> None:
        text = Path(path).read_text()  # SpeechBrain writes YAML, with fewer counters
        state = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
        for name in COUNTERS:
            setattr(self, name, int(state.get(name, getattr(self, name))))
        self.training_metrics.restore(state)
        self.evaluator.restore(state)
        self.stopping.time_limit.spent = state.get(FIT_SECONDS, 0.0)
        position = {name: state[name] for name in ResumedPosition._fields if name in state}
        self._resumed = ResumedPosition(**position)


# ---- a run


@contextmanager
def watching(brain: Brain) -> Iterator[None]:
    """Watch for a hang, and wait for stores that are away."""
    seconds, patience = (
        brain.settings[name] or 0  # None for never
        for name in ("stall_seconds", "store_patience")
    )
    with (
        # A rank does not hang while it, or another one, waits for a store that is away.
        Watchdog(brain.run_folder, seconds=seconds and seconds + patience) as brain.watchdog,
        store_patience(patience),
        reporting(brain.ping, show_progress=not brain.noprogressbar),
    ):
        brain.ping("start")
        yield


def as_loaders(
    brain: Brain, data: object, stage: Stage, options: LoaderOptions
) -> dict[str, Batches]:
    """Return the loader of each split."""
    by_name = data if isinstance(data, Mapping) else {stage.name.lower(): data}
    in_checkpoints = {} if stage is Stage.TRAIN else {"ckpt_prefix": None}
    return {
        name: split
        if isinstance(split, DataLoader | LoopedLoader)
        else brain.make_dataloader(split, stage, **{**(options or {}), **in_checkpoints})
        for name, split in by_name.items()
    }


def open_metrics(brain: Brain, epochs: Iterable[int], train_set: Batches) -> None:
    """Open the log of a fit, and say where it resumes."""
    num_epochs = getattr(epochs, "limit", None) or length_of(epochs) or 0
    next_epoch = getattr(epochs, "current", 0) + 1
    sampler = getattr(train_set, "batch_sampler", None)
    if isinstance(sampler, RankSampler):  # its plan of this epoch is needed anyway
        sampler.set_epoch(next_epoch)
    num_steps = num_epochs * -(-(length_of(train_set) or 0) // brain.grad_accumulation_factor)
    if brain.optimizer_step and (brain.step or next_epoch <= num_epochs):
        logger.info(f"Resuming after step {brain.optimizer_step}, in epoch {next_epoch}.")
    if brain.stopping.time_limit.max_seconds:
        logger.info("note: the clock ends this run (`max_minutes`), so no other is its equal.")
    brain.training_metrics.open(
        brain.run_folder,
        TrainingProgress(
            total_epochs=num_epochs,
            total_steps=num_steps,
            metrics=type(brain).metrics,
            clock_share=brain.stopping.time_limit.measure,
        ),
        step=brain.optimizer_step,
        sources=[] if brain.loaders is None else [*brain.loaders.splits.mix],
    )


# ---- a step


def has_own_step(brain: Brain) -> bool:
    """Return whether a recipe has a `fit_batch` of its own."""
    return type(brain).fit_batch is not Brain.fit_batch


def seeded(brain: Brain, batch: object) -> AbstractContextManager[None]:
    """Seed random numbers from the position in the run, so that a resumed run draws the same.

    `draw_uniform` is seeded by utterance, and torch by rank.
    """
    seed, epoch = brain.hparams.seed, brain.hparams.epoch_counter.current
    seed_torch(seed, epoch=epoch, micro_batch=brain.step)
    step = (brain.step - 1) // brain.grad_accumulation_factor
    return seeded_draws(ids_of(batch), seed=seed, epoch=epoch, step=step)


def active_optimizers(brain: Brain) -> dict[str, Optimizer]:
    """Return the optimizers that step, by name."""
    if brain.optimizers_dict is not None:
        return dict(brain.freeze_optimizers(brain.optimizers_dict))
    return {} if brain.opt_class is None else {"opt_class": brain.optimizer}


def set_scheduled_rate(brain: Brain) -> None:
    """Set the rate of the next step, if there is an `lr_schedule`."""
    if brain.schedule is None:
        return
    epoch, step = brain.hparams.epoch_counter.current, brain.optimizer_step + 1
    factor = brain.schedule(Position(brain.run_share, step, epoch, brain.evaluator.validations))
    set_rate(active_optimizers(brain).values(), factor)


def mark_last(batches: Batches, *, count: int | None, done: int) -> Iterator[tuple[Any, bool]]:
    """Yield each batch and whether it is the last of its epoch; ``done`` batches came before.

    If their ``count`` is not known, one batch is read ahead. Otherwise none is: a loader that saves
    its position would be one batch too far.
    """
    if count is not None:
        yield from ((batch, index == count) for index, batch in enumerate(batches, done + 1))
        return
    for batch, following in pairwise(chain(batches, [None])):
        yield batch, following is None


def training_loss(brain: Brain, batch: object) -> Loss:
    """Compute the loss of a batch as in training, but on this rank only."""
    brain.training_step.train_mode()
    with brain.training_ctx:
        outputs = brain.compute_forward(batch, Stage.TRAIN)
        return as_loss(brain.compute_objectives(outputs, batch, Stage.TRAIN))


# ---- a validation


def evaluate_stage(
    brain: Brain, loaders: SplitLoaders, stage: Stage, epoch: int | None, *, micro_batch: int = 0
) -> float:
    """Evaluate after an epoch, or within one after ``micro_batch``; return the mean loss."""
    brain.on_stage_start(stage, epoch)
    losses = brain.evaluate_splits(loaders, stage, phase=stage.name.lower())
    brain.stop_if_signaled(in_training=stage is Stage.VALID)
    mean = mean_over_ranks(losses)
    brain.step = len(losses) if stage is Stage.TEST else micro_batch  # as in SpeechBrain
    if stage is Stage.VALID:
        brain.evaluator.is_current = True
        brain.evaluator.validated_step = brain.optimizer_step
        if isinstance(brain.checkpointer, Checkpointer):
            brain.checkpointer.is_within_epoch = micro_batch > 0
    brain.on_stage_end(stage, mean, epoch)
    brain.step = micro_batch
    return mean


def averaging_error(brain: Brain) -> float:
    """Return the error of the loaded weights on the validation sets."""
    epochs = getattr(brain.hparams, "epoch_counter", None)
    brain.on_stage_start(Stage.VALID, getattr(epochs, "current", None))
    brain.evaluate_splits(brain.evaluator.loaders, Stage.VALID, phase="averaging")
    brain.stop_if_signaled()
    return brain.evaluator.error(brain.evaluator.measure_splits())


def end_validation(brain: Brain, loss: float, epoch: int) -> None:
    """Log a validation, save, and tell the user."""
    values = brain.evaluator.end_validation(epoch)  # before the save, which has its result
    best = best_key(brain.evaluator.metrics)
    num_averaged = int(brain.settings["average_checkpoints"])
    figures = brain.training_metrics.log_epoch(
        epoch,
        brain.optimizer_step,
        valid_loss=loss,
        values={name: value for name, value in values.items() if name not in LOSS_METRIC},
    )
    # Before the save: a run that this share ends is over by the seconds in its checkpoint, too.
    brain.stopping.time_limit.agree()
    if brain.checkpointer is not None:
        position = {"epoch": epoch, "optimizer_step": brain.optimizer_step}
        seconds = {FIT_SECONDS: brain.stopping.time_limit.seconds}
        ranking = {STALE_VALIDATIONS: brain.evaluator.stale, RANKED_BY: best._asdict()}
        brain.checkpointer.save_and_keep_only(
            meta={**values, **position, **seconds, **ranking},
            num_to_keep=num_averaged,
            max_keys=[best.max_key] if best.max_key else [],
            min_keys=[best.min_key] if best.min_key else [],
        )
    # After the save, which must not wait for a screen
    brain.training_metrics.progress.report_epoch(figures)
    if brain.on_epoch is not None:
        with raise_on_all_ranks(Exception):  # the user's code may raise any
            if rank() == 0:
                brain.on_epoch(figures.as_record())
