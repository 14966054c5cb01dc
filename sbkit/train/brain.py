"""What a recipe is written as: SpeechBrain's Brain with its hooks, trained by `sbkit.train.loop`.

A recipe overrides `compute_forward` and `compute_objectives`, and as much of `on_stage_start`,
`on_stage_end` and `on_fit_batch_start` as it needs. `compute_objectives` returns a `Loss` of sums
and counts, or a plain mean as in SpeechBrain.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

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
from torch.utils.data import DataLoader

from sbkit.base.errors import BundleError, ConfigError, translate
from sbkit.base.libraries import place_of
from sbkit.base.machine import warn_of_unused_gpu
from sbkit.bundle.config import BundleConfig
from sbkit.bundle.task import Task, mean_loss
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.ranking import NORMALIZER, PARTS, AveragedCheckpoints
from sbkit.checkpoint.rng import (
    random_state,
)
from sbkit.config.hparams import RECIPE, SettingAttributes, Settings
from sbkit.config.keys import with_defaults
from sbkit.data.batch import Loaders, length_of
from sbkit.distributed.device import Placement, check_precision, resolve_placement
from sbkit.distributed.ranks import world_size
from sbkit.logs.metric import LOSS_METRIC, Metrics, best_key, describe_values
from sbkit.logs.progress import progress_bar
from sbkit.logs.run_log import Record
from sbkit.models.compiling import compile_blocks
from sbkit.models.layers import GlobalNorm
from sbkit.models.loss import Amount, Loss
from sbkit.text.normalization import TextTable, language_table, table_from_stored
from sbkit.train import loop
from sbkit.train.evaluation import Evaluator
from sbkit.train.loop import Batches, ResumedPosition, SplitLoaders
from sbkit.train.metrics import TrainingMetrics
from sbkit.train.model_state import (
    ComputeFeatures,
    measure_normalization,
)
from sbkit.train.nonfinite import ids_of
from sbkit.train.optimizers import (
    Freezing,
    OptimizerClass,
    make_optimizers,
    named_parameters,
    naming_parameters,
    with_rates,
)
from sbkit.train.ownership import OwnerCheck
from sbkit.train.run_options import check_hooks, read_run_options
from sbkit.train.schedule import parse_schedule
from sbkit.train.step import Objective, TrainingStep, as_loss
from sbkit.train.stopping import (
    FIT_SECONDS,
    EpochSaver,
    TimeLimit,
)
from sbkit.train.watchdog import Watchdog, watching

logger = logging.getLogger(__name__)

T = TypeVar("T")
LoaderOptions = Mapping[str, Any] | None

COUNTERS = ("step", "optimizer_step", "nonfinite_count")
PHASES = {  # titles of the progress bar
    "valid": "validating",
    "test": "testing",
    "averaging": "averaging checkpoints",
    "measure": "measuring features",
}


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
        is_last_batch: whether the micro-batch is the last of its epoch.
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
                recipe or its task: what the model predicts, and how it is scored.
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
        options.setdefault("find_unused_parameters", not self.has_own_step)
        check_hooks(type(self), has_own_step=self.has_own_step)
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
        if world_size() > 1:  # for modules that a recipe wraps
            self.distributed_backend = dist.get_backend()
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
            None if checkpointer is None else partial(loop.save_within_epoch, self),
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
        self.is_last_batch = False
        self.resumed = ResumedPosition()
        recipe = settings.get(RECIPE)
        task = getattr(recipe, "task", recipe)
        self.task = task if isinstance(task, Task) else None
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
                f"{error}{place_of(error)}). Name the YAML keys that it takes in `parts` of "
                f"{type(self).__name__}."
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
        loop.fit(self, epoch_counter, loader, valid_loaders, show_progress=show_progress)

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
            return loop.test(self, loaders)

    def load_tested_weights(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the weights that a test measures; without a key, the best of the saved metric."""
        keys: Mapping[str, str | None] = {"max_key": max_key, "min_key": min_key}
        if not (max_key or min_key) and type(self).metrics:
            keys = best_key(type(self).metrics)._asdict()
        elif not (max_key or min_key) and isinstance(self.checkpointer, Checkpointer):
            keys = self.checkpointer.saved.ranked_by()
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
        loop.stop_if_signaled(self, in_training=in_training)

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

    # ---- a step

    def fit_batch(self, batch: Any) -> Objective:
        """Add one micro-batch's gradient, and step when the global batch is complete.

        Returns the result of `compute_objectives`, without its graph. A recipe may override this,
        and then calls `optimizers_step` with the gradient of a mean.
        """
        return loop.fit_batch(self, batch)

    @property
    def should_step(self) -> bool:
        """Whether the optimizer steps after this micro-batch: every few, and after the last."""
        return self.is_last_batch or self.step % self.grad_accumulation_factor == 0

    def optimizers_step(self) -> None:
        """Step every optimizer, or none if a loss or a gradient is not finite."""
        loop.step_or_skip(self)

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
        if self.has_own_step:
            super()._wrap_distributed()

    @property
    def has_own_step(self) -> bool:
        """Whether the recipe has a `fit_batch` of its own."""
        return type(self).fit_batch is not Brain.fit_batch

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
        """The table that normalizes texts, which a bundle of this Brain has, too."""
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

    def _fit_valid(self, valid_set: SplitLoaders, epoch: int, show_progress: bool) -> None:
        """Validate; a recipe may override this to do so less often, except after the last epoch."""
        loop.validate(self, valid_set, epoch)

    def evaluate_splits(self, loaders: SplitLoaders, stage: Stage, *, phase: str) -> list[Loss]:
        """Return the loss of every batch, and leave the results of each split in the evaluator.

        A signal ends it early. ``phase`` names it for the watchdog and the progress bar.
        """
        return loop.evaluate_splits(self, loaders, stage, phase=phase)

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Return the result of `compute_objectives` for a batch, a Loss or a mean, on the CPU."""
        return loop.evaluate_batch(self, batch, stage)

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
            loop.end_validation(self, stage_loss, epoch or 0)

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

    # ---- checkpoints

    @mark_as_saver  # type: ignore[untyped-decorator]
    def save_position(self, path: str | Path) -> None:
        state = {name: getattr(self, name) for name in COUNTERS}
        state["accumulation"] = self.grad_accumulation_factor
        state["is_trained"] = self.is_last_batch and self.step > 0
        state[FIT_SECONDS] = self.stopping.time_limit.seconds
        state |= self.evaluator.state() | self.training_metrics.state()
        state["random"] = random_state(self.device)
        Path(path).write_text(json.dumps(state))

    @mark_as_loader  # type: ignore[untyped-decorator]
    def load_position(self, path: str | Path, end_of_epoch: bool) -> None:
        text = Path(path).read_text()  # SpeechBrain writes YAML, with fewer counters
        state = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
        for name in COUNTERS:
            setattr(self, name, int(state.get(name, getattr(self, name))))
        self.training_metrics.restore(state)
        self.evaluator.restore(state)
        self.stopping.time_limit.spent = state.get(FIT_SECONDS, 0.0)
        position = {name: state[name] for name in ResumedPosition._fields if name in state}
        self.resumed = ResumedPosition(**position)


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


def training_loss(brain: Brain, batch: object) -> Loss:
    """Compute the loss of a batch as in training, but on this rank only."""
    brain.training_step.train_mode()
    with brain.training_ctx:
        outputs = brain.compute_forward(batch, Stage.TRAIN)
        return as_loss(brain.compute_objectives(outputs, batch, Stage.TRAIN))


def averaging_error(brain: Brain) -> float:
    """Return the error of the loaded weights on the validation sets."""
    epochs = getattr(brain.hparams, "epoch_counter", None)
    brain.on_stage_start(Stage.VALID, getattr(epochs, "current", None))
    loop.evaluate_splits(brain, brain.evaluator.loaders, Stage.VALID, phase="averaging")
    loop.stop_if_signaled(brain)
    return brain.evaluator.error(brain.evaluator.measure_splits())
