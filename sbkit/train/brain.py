"""The training loop: SpeechBrain's Brain with its ways kept, exact where it is not.

A recipe overrides `compute_forward` and `compute_objectives`, and as much of `on_stage_start`,
`on_stage_end` and `on_fit_batch_start` as it needs. `compute_objectives` gives a `Loss` of sums and
counts, or a plain mean as in SpeechBrain.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import speechbrain as sb
import torch
import torch.distributed as dist
import yaml
from speechbrain import Stage
from speechbrain.dataio.dataloader import LoopedLoader
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sbkit.checkpoint.brain_state import check_brain_state
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.rng import State, random_state, restore_random_state, torch_state
from sbkit.data.batch import Batch
from sbkit.data.loaders import Loaders
from sbkit.data.sampler import TrainSampler
from sbkit.distributed.device import resolve
from sbkit.distributed.ranks import gather_over_ranks, rank, world_size
from sbkit.logs.log import say
from sbkit.logs.metric import Metrics, as_words
from sbkit.models.loss import Loss
from sbkit.train.cost import CostRecorder
from sbkit.train.evaluation import (
    best_keys,
    gather_results,
    mean_over_ranks,
    measure_splits,
    report_test,
)
from sbkit.train.freeze import Frozen, with_lr_scale
from sbkit.train.meter import MetricTotals
from sbkit.train.metrics import TrainingMetrics
from sbkit.train.nonfinite import ids_of
from sbkit.train.optimizer_step import OptimizerStep
from sbkit.train.options import declared_options
from sbkit.train.save_or_leave import SaveOrLeave, leave
from sbkit.train.step import DdpStep, ForwardLoss, as_loss, average_statistics
from sbkit.train.walk import length_of, mark_last, share_of_steps
from sbkit.train.watchdog import NullWatchdog, Watchdog

STALL_SECONDS = 120.0
LOG_EVERY = 10  # optimizer steps between two readings of the device, unless `log_every` says more
COUNTERS = ("step", "optimizer_step", "nonfinite_count")


@register_checkpoint_hooks
class Brain(sb.Brain):  # type: ignore[misc]
    """Train and evaluate what a recipe defines.

    `device` may be a string or a torch.device; only its type reaches autocast and GradScaler.
    Raises SbkitError when device and precision do not go together here.

    Attributes:
        metrics: what `measure` computes, by name; the first one chooses the best checkpoint.
        loaders: those of the run, where a `Run` made the Brain.
        split: the name of the split that is being evaluated.
        results: what `score` returned of each split so far.
    """

    metrics: ClassVar[Metrics] = {}
    loaders: Loaders | None = None

    def __init__(
        self,
        modules: dict[str, nn.Module] | None = None,
        opt_class: Any = None,
        hparams: dict[str, Any] | None = None,
        run_opts: Any = None,
        checkpointer: Any = None,
    ) -> None:
        options = declared_options(hparams, run_opts)
        placement = resolve(options.get("device"), options.get("precision", "fp32"))
        evaluation = resolve(placement.device.type, options.get("eval_precision", "fp32"))
        options["device"] = str(placement.device)
        declared = hparams or {}
        self.frozen = Frozen(declared.get("freeze") or (), declared)
        opt_class = with_lr_scale(opt_class, declared.get("lr_scale") or {}, declared)
        super().__init__(modules, opt_class, hparams, options, checkpointer)
        self.device, self.device_type = placement.device, placement.device.type
        self.training_ctx, self.evaluation_ctx = placement.autocast(), evaluation.autocast()
        self.scaler = placement.grad_scaler()
        if self.scaler.is_enabled() and checkpointer is not None:  # in the place of SpeechBrain's
            checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)
        self.training_metrics = TrainingMetrics(self.device)
        self.cost = CostRecorder(self.modules, self.device)
        self.split, self.results = "", dict[str, list[Any]]()
        self.global_step = OptimizerStep(self.modules, self.device, self._run_folder)
        self.between = SaveOrLeave(
            minutes=self.ckpt_interval_minutes, steps=self.ckpt_interval_steps
        )
        self.signals = self.between.signals
        self.watchdog = NullWatchdog()
        self.epoch_share = 0.0  # of the current epoch, before the current step
        self.step, self.optimizer_step = 0, 0  # micro-batches of the epoch, steps of the run
        self._steps_of_epoch = 0
        self._is_last = False  # micro-batch of its epoch
        self._is_planned = False  # the epoch, by sbkit's sampler
        self._valid_set: Mapping[str, Any] = {}  # of the last fit
        self._recovered: State | None = None  # random generators, until they are set
        graph = ForwardLoss(
            modules=self.modules, forward=self.compute_forward, objectives=self.compute_objectives
        )
        self._ddp_step = DdpStep(
            graph, self.device, find_unused_parameters=self.find_unused_parameters
        )

    # -- the run ------------------------------------------------------------------------------

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: Any,
        valid_set: Any = None,
        progressbar: bool | None = None,
        train_loader_kwargs: dict[str, Any] | None = None,
        valid_loader_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Train and validate epoch after epoch, from wherever the last checkpoint stands.

        ``valid_set`` is one set, or several by their names.
        """
        if self.test_only:
            return
        train_set = self._loader(train_set, Stage.TRAIN, train_loader_kwargs)
        valid_set = self._named_loaders(valid_set, Stage.VALID, valid_loader_kwargs)
        self._valid_set = valid_set or {}
        enable = not self.noprogressbar if progressbar is None else progressbar
        try:
            with self._watchdog() as self.watchdog, self.cost:
                if isinstance(self.checkpointer, Checkpointer):
                    self.checkpointer.claim()
                self.on_fit_start()  # asked to stop in it, a run leaves at once: nothing is trained
                if self.step == 0:
                    self._resume_random()
                self._open_metrics(epoch_counter, train_set)
                with self.signals:
                    self._fit_epochs(epoch_counter, train_set, valid_set, enable)
        finally:
            self.training_metrics.close()
            self._unwrap_distributed()

    def _fit_epochs(
        self, epoch_counter: Iterable[int], train_set: Any, valid_set: Any, enable: bool
    ) -> None:
        for epoch in epoch_counter:
            self._fit_train(train_set, epoch, enable)
            self._fit_valid(valid_set, epoch, enable)
            is_debugged = self.debug and 0 < self.debug_epochs <= epoch
            if self._optimizer_step_limit_exceeded or is_debugged:
                break

    def evaluate(
        self,
        test_set: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: dict[str, Any] | None = None,
    ) -> float:
        """Load the best checkpoint, evaluate one set or several by name, and return the mean loss.

        Without a key the first of `metrics` says which checkpoint is best.
        """
        test_set = self._named_loaders(test_set, Stage.TEST, test_loader_kwargs)
        if self.metrics and max_key is None and min_key is None:
            keys = best_keys(self.metrics)
            max_key, min_key = next(iter(keys.max_keys), None), next(iter(keys.min_keys), None)
        self.on_evaluate_start(max_key=max_key, min_key=min_key)
        with self.signals, self._watchdog() as self.watchdog:
            return self._evaluate_stage(test_set, Stage.TEST, None)

    # -- training -----------------------------------------------------------------------------

    def _fit_train(self, train_set: Any, epoch: int, enable: bool) -> None:
        self.on_stage_start(Stage.TRAIN, epoch)
        self.cost.begin_epoch(self.optimizer_step)
        self.global_step.begin_epoch(afresh=self.step == 0)
        self.training_metrics.start_epoch(afresh=self.step == 0)
        self.modules.train()
        self.frozen.eval()
        self.zero_grad(set_to_none=True)
        self._choose_epoch(train_set, epoch)
        count = length_of(train_set)
        log_every = self._declared("log_every", LOG_EVERY)
        batches = iter(train_set)
        self._resume_random()  # in mid-epoch: the loader has drawn a seed that lies behind
        marked = mark_last(batches, count=count, done=self.step)
        for batch, is_last in self.training_metrics.meter.timed(marked):
            if self._optimizer_step_limit_exceeded:
                break
            self.epoch_share = share_of_steps(self.step, count, self.grad_accumulation_factor)
            self.watchdog.ping("step", self.optimizer_step, ids_of(batch))
            self._wrap_step(batch)
            self.step, self._is_last = self.step + 1, is_last
            steps_before = self.optimizer_step
            objective = self.fit_batch(batch)
            self.training_metrics.meter.add(as_loss(objective), getattr(batch, "seconds", 0.0))
            has_stepped = self.optimizer_step > steps_before
            if has_stepped and self.optimizer_step % log_every == 0:
                self._log_step(epoch, live=enable)
            if self.debug and self.step >= self.debug_batches:
                break
            if self.should_step:
                self._save_or_leave(is_last)
            self.watchdog.ping("data", self.optimizer_step)
        self._read()
        self.zero_grad(set_to_none=True)
        self._steps_of_epoch = self.step
        self.on_stage_end(Stage.TRAIN, self.training_metrics.so_far.loss, epoch)
        self.avg_train_loss, self.step = 0.0, 0

    @property
    def should_step(self) -> bool:
        """Return whether the optimizer steps with this micro-batch: every so many, and the last."""
        return self._is_last or self.step % self.grad_accumulation_factor == 0

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the best checkpoint, or the mean of the `average_checkpoints` best.

        The counters stay those of the whole run.
        """
        counters = {name: getattr(self, name) for name in (*COUNTERS, "_recovered")}
        figures = self.training_metrics.state()
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        count = int(self._declared("average_checkpoints", 1))
        if count > 1 and isinstance(self.checkpointer, Checkpointer):
            score = self.validation_error if self._valid_set else None
            averaged = self.checkpointer.load_average(
                count, score, max_key=max_key, min_key=min_key
            )
            if averaged is not None and score is not None:
                say(str(averaged))
        for name, value in counters.items():
            setattr(self, name, value)
        self.training_metrics.restore(figures)

    def validation_error(self) -> float:
        """Validate the weights as they are, and return what chooses the best: lower is better.

        That is the first of `metrics`, negative where more is better, or else the mean loss.
        """
        self.results = {name: [] for name in self._valid_set}
        self.on_stage_start(Stage.VALID)
        self.modules.eval()
        losses: list[Loss] = []
        for name, loader in self._valid_set.items():
            self.split = name
            batches = self.pinging(loader, "averaging")
            losses += [as_loss(self.evaluate_batch(each, Stage.VALID)) for each in batches]
        if not self.metrics:
            return mean_over_ranks(losses)
        name, metric = next(iter(self.metrics.items()))
        value = measure_splits(self.measure, gather_results(self.results))[name]
        return value if metric.lower_is_better else -value

    def fit_batch(self, batch: Any) -> Any:
        """Add one micro-batch's gradient, and step when the batch of the optimizer is whole.

        Gives what `compute_objectives` gave, a Loss or a mean, without its graph; so may a recipe
        that overrides this. `optimizers_step` expects the gradient of a mean.
        """
        placed = self._placed(batch)
        if (self.step - 1) % self.grad_accumulation_factor == 0:  # the first of its step
            self.global_step.begin()
        self._begin_step(placed)
        self.on_fit_batch_start(placed, self.should_step)
        random = torch_state(self.device)
        with self.no_sync(not self.should_step):
            with self.training_ctx:
                outputs, objective = self._ddp_step(placed)
            self.global_step.backward(as_loss(objective), self.scaler, batch, random, self.step)
        if self.should_step:
            self.global_step.normalize(self._active_optimizers())
            self.optimizers_step()
            self.modules.zero_grad(set_to_none=True)  # a frozen optimizer's would pile up
        self.cost.end_step()
        self.on_fit_batch_end(placed, outputs, objective, self.should_step)
        return objective.detach()

    def _begin_step(self, batch: Any) -> None:
        """Set the rate and the seed from the place in the run: a resumed run needs nothing else.

        The rate where the YAML has `lr_schedule`, a function of the progress of the run; the seed
        where sbkit's sampler plans the batches.
        """
        epochs, schedule = (
            self._declared("epoch_counter", None),
            self._declared("lr_schedule", None),
        )
        if schedule is not None:
            rate = self.hparams.lr * schedule(
                (epochs.current - 1 + self.epoch_share) / epochs.limit
            )
            for optimizer in self._active_optimizers():
                for group in optimizer.param_groups:
                    group["lr"] = rate * group.get("lr_scale", 1.0)
        if self._is_planned:
            place = (self.hparams.seed, epochs.current, self.step, rank())
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        self.cost.begin_step(batch.audio.numel() if isinstance(batch, Batch) else 0)

    def optimizers_step(self) -> None:
        """Take the step, unless its gradient is not finite."""
        optimizers = self._active_optimizers()
        if not optimizers:
            return
        self.global_step.take(
            optimizers,
            self.scaler,
            max_grad_norm=self.max_grad_norm,
            number=self.optimizer_step + 1,
        )
        self.optimizer_step += 1
        if self.device_type == "cpu":  # nothing to wait for, and the weights are still the step's
            self._read_skipped()

    def _read_skipped(self) -> None:
        skipped = self.global_step.read(self.nonfinite_patience, self.scaler)
        self.training_metrics.meter.skipped += skipped

    @property
    def nonfinite_count(self) -> int:
        """Count the bad steps of this epoch, by SpeechBrain's name."""
        return self.global_step.bad_steps

    @nonfinite_count.setter
    def nonfinite_count(self, count: int) -> None:
        if hasattr(self, "global_step"):  # SpeechBrain's own constructor sets it to 0 before
            self.global_step.bad_steps = count

    def _active_optimizers(self) -> list[Optimizer]:
        """List the optimizers that step now: `init_optimizers` makes several, one, or none."""
        if self.optimizers_dict is not None:
            return list(self.freeze_optimizers(self.optimizers_dict).values())
        return [self.optimizer] if self.opt_class is not None else []

    # -- evaluation ---------------------------------------------------------------------------

    def _fit_valid(self, valid_set: Any, epoch: int, enable: bool) -> None:
        """Validate. A recipe may override this, to do it less often; hence the arguments."""
        if valid_set is not None:
            self.cost.begin_validation()
            self._evaluate_stage(valid_set, Stage.VALID, epoch)
        self.cost.end_epoch(self.optimizer_step)

    @torch.no_grad()
    def _evaluate_stage(self, loaders: Mapping[str, Any], stage: Stage, epoch: int | None) -> float:
        self.results = {name: [] for name in loaders}
        self.on_stage_start(stage, epoch)
        self.modules.eval()
        average_statistics(self.modules)
        losses: list[Loss] = []
        for name, loader in loaders.items():
            self.split = name
            losses += self._evaluate(loader, stage)
        steps, self.step = self.step, 0
        if any(gather_over_ranks(self.signals.heard is not None)):
            self._leave_evaluation(stage)
        mean = mean_over_ranks(losses)
        self.step = steps if stage is Stage.TEST else 0  # as SpeechBrain has it
        self.cost.end_step()
        self.on_stage_end(stage, mean, epoch)
        self.step = 0
        return mean

    def _evaluate(self, loader: Any, stage: Stage) -> Iterator[Loss]:
        """Evaluate one split; after a signal nothing more."""
        for batch in self.pinging(loader, stage.name.lower()):
            if self.signals.heard:
                return
            self.step += 1
            yield as_loss(self.evaluate_batch(batch, stage))
            if self.debug and self.step >= self.debug_batches:
                return

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Return what `compute_objectives` makes of one batch, a Loss or a mean, on the CPU."""
        batch = self._placed(batch)
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage=stage)
            objective = self.compute_objectives(outputs, batch, stage=stage)
        if self.metrics:
            self.results.setdefault(self.split, []).extend(self.score(outputs, batch))
        return objective.detach().cpu()

    # -- what a recipe with `metrics` defines -----------------------------------------------------

    def score(self, outputs: Any, batch: Any) -> Sequence[Any]:
        """Return a result for every utterance of an evaluated batch, plain data that travels."""
        raise NotImplementedError("a Brain with `metrics` defines `score`")

    def measure(self, results: Sequence[Any]) -> Mapping[str, float]:
        """Return the value of each of `metrics` over the results of a split."""
        raise NotImplementedError("a Brain with `metrics` defines `measure`")

    def report(self, split: str, results: Sequence[Any], folder: Path) -> Mapping[str, Any]:
        """Write a test set's report into the run folder; return its entry in `summary.json`."""
        return self.measure(results)

    def describe(self, results: Sequence[Any]) -> str:
        """Write the metrics of a test set for the screen; a recipe may add the counts."""
        return ", ".join(as_words(self.metrics, self.measure(results)))

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Log, show and save after validation, report after the test, where there are `metrics`."""
        if not self.metrics or stage is Stage.TRAIN:
            return
        results = gather_results(self.results)
        if stage is Stage.TEST:
            report_test(self, results)
            return
        values = measure_splits(self.measure, results)
        self.training_metrics.log_epoch(
            epoch or 0, self.optimizer_step, valid_loss=stage_loss, values=values
        )
        self.checkpointer.save_and_keep_only(
            meta={**values, "epoch": epoch},
            num_to_keep=self.hparams.average_checkpoints,
            **asdict(best_keys(self.metrics)),
        )

    # -- parts of the loop --------------------------------------------------------------------

    def pinging(self, batches: Iterable[Any], phase: str) -> Iterator[Any]:
        """Walk batches with a sign of life at each, outside the training loop."""
        for batch in batches:
            self.watchdog.ping(phase, self.optimizer_step, ids_of(batch))
            yield batch

    def _choose_epoch(self, train_set: Any, epoch: int) -> None:
        """Set on the sampler the epoch and, after a resume, where in it the run stands."""
        sampler = getattr(train_set, "batch_sampler", None)
        self._is_planned = isinstance(sampler, TrainSampler)
        self.global_step.nonfinite.begin_epoch(sampler, epoch)
        if isinstance(sampler, TrainSampler):
            sampler.set_epoch(epoch, start=self.step)
        elif hasattr(self.train_sampler, "set_epoch"):
            self.train_sampler.set_epoch(epoch)

    def _placed(self, batch: Any) -> Any:
        return batch.to(self.device) if hasattr(batch, "to") else batch

    def _log_step(self, epoch: int, *, live: bool) -> None:
        rates = [each.param_groups[0]["lr"] for each in self._active_optimizers()]
        rate = rates[0] if rates else 0.0
        reading = self._read()
        self.training_metrics.log_step(epoch, self.optimizer_step, reading, rate=rate, live=live)

    def _read(self) -> MetricTotals:
        """Ask the device what was lost since the last reading, and which steps were bad."""
        self._read_skipped()
        reading = self.training_metrics.read()
        self.avg_train_loss = self.training_metrics.so_far.loss
        return reading

    def _open_metrics(self, epochs: Any, train_set: Any) -> None:
        total_epochs = getattr(epochs, "limit", None) or length_of(epochs) or 0
        steps = -(-(length_of(train_set) or 0) // self.grad_accumulation_factor)
        self.training_metrics.open(
            self._run_folder,
            resume_step=self.optimizer_step,
            total_epochs=total_epochs,
            total_steps=total_epochs * steps,
            metrics=self.metrics,
            within_epoch=self.step > 0,
        )

    # -- between two steps --------------------------------------------------------------------

    def _save_or_leave(self, is_last: bool) -> None:
        decision = self.between.decide(self.optimizer_step, is_last=is_last)
        if decision.save:
            self._save_here()
        if decision.stop:
            leave(self.optimizer_step, is_saved=self.checkpointer is not None)

    def _save_here(self) -> None:
        self.between.note_save()
        if self.checkpointer is not None:
            self.watchdog.ping("checkpoint", self.optimizer_step)
            self._read_skipped()
            self._save_intra_epoch_ckpt()

    def _leave_evaluation(self, stage: Stage) -> None:
        """Leave without the figures; a run that goes on validates again."""
        if stage is Stage.VALID:
            self.step = self._steps_of_epoch
            self._save_here()
        leave(self.optimizer_step, is_saved=self.checkpointer is not None)

    def _watchdog(self) -> NullWatchdog:
        seconds, folder = self._declared("stall_seconds", STALL_SECONDS), self._run_folder
        if folder is None or not seconds:
            return NullWatchdog()
        return Watchdog(folder, stall_seconds=seconds)

    def _declared(self, name: str, default: Any) -> Any:
        return getattr(getattr(self, "hparams", None), name, default)

    @property
    def _run_folder(self) -> Path | None:
        folder = self._declared("output_folder", None)
        return None if folder is None else Path(folder)

    def _named_loaders(self, data: Any, stage: Stage, options: dict[str, Any] | None) -> Any:
        """Return the loader of each split by its name; a set without one is named as the stage."""
        if data is None:
            return None
        named = data if isinstance(data, Mapping) else {stage.name.lower(): data}
        return {name: self._loader(each, stage, options) for name, each in named.items()}

    def _loader(self, data: Any, stage: Stage, options: dict[str, Any] | None) -> Any:
        if data is None or isinstance(data, DataLoader | LoopedLoader):
            return data
        prefix = {} if stage is Stage.TRAIN else {"ckpt_prefix": None}
        return self.make_dataloader(data, stage, **{**(options or {}), **prefix})

    # -- processes ----------------------------------------------------------------------------

    def _wrap_distributed(self) -> None:
        """Wrap every module for a recipe with a `fit_batch` of its own; else `_wrap_step` does."""
        if self._has_own_step() and world_size() > 1:
            self.distributed_backend = dist.get_backend()
            super()._wrap_distributed()

    @property
    def resting(self) -> tuple[nn.Module, ...]:
        """Return the modules that the present knobs turn off, which need no gradient."""
        return ()

    def _wrap_step(self, batch: Any) -> None:
        """Share the step once, when there is a batch to see its unused parameters by."""
        if world_size() == 1 or self._ddp_step.is_wrapped or self._has_own_step():
            return
        resting = {id(each) for part in self.resting for each in part.parameters()}
        unused = [
            name
            for name in self._ddp_step.wrap(self._placed(batch))
            if id(self.modules.get_parameter(name)) not in resting
        ]
        if unused:
            names = ", ".join(unused[:3]) + (", ..." if unused[3:] else "")
            verb = "gets no gradient and stays" if len(unused) == 1 else "get no gradient and stay"
            say(
                f"note: {len(unused)} of the model's parameters ({names}) {verb} as made. For a "
                "part in later steps only, declare find_unused_parameters: True."
            )

    def _unwrap_distributed(self) -> None:
        """Let go of the reducers."""
        self._ddp_step.unwrap()
        for name, module in self.modules.items():
            if isinstance(module, DistributedDataParallel):
                self.modules[name] = module.module

    def _has_own_step(self) -> bool:
        return type(self).fit_batch is not Brain.fit_batch

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        """Leave gradients on this rank while a batch is still being accumulated."""
        if use and self._ddp_step.is_wrapped:
            return self._ddp_step.no_sync()
        context: AbstractContextManager[None] = super().no_sync(use)
        return context

    # -- checkpoints --------------------------------------------------------------------------

    def _save_intra_epoch_ckpt(self) -> None:
        """Save, also what the device was not yet asked for."""
        with self.training_metrics.unread_kept():
            super()._save_intra_epoch_ckpt()

    @mark_as_saver  # type: ignore[untyped-decorator]
    def _save(self, path: str | Path) -> None:
        state = {name: getattr(self, name) for name in COUNTERS}
        state |= self.training_metrics.state()
        state["random"] = random_state(self.device)
        Path(path).write_text(json.dumps(state))

    @mark_as_loader  # type: ignore[untyped-decorator]
    def _recover(self, path: str | Path, end_of_epoch: bool) -> None:
        text = Path(path).read_text()
        # A run that began under SpeechBrain left YAML, with fewer counters.
        state = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
        check_brain_state(state, COUNTERS)
        for name in COUNTERS:
            setattr(self, name, state.get(name, getattr(self, name)))
        self.training_metrics.restore(state)
        self._recovered = state.get("random")

    def _resume_random(self) -> None:
        """Go on drawing where the run stood when it was saved."""
        if self._recovered is not None:
            restore_random_state(self._recovered, self.device)
            self._recovered = None
