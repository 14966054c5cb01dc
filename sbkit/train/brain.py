"""The training loop: SpeechBrain's Brain with its hooks, exact where that is not.

A recipe overrides `compute_forward` and `compute_objectives`, and as much of `on_stage_start`,
`on_stage_end` and `on_fit_batch_start` as it needs. `compute_objectives` gives a `Loss` of sums and
counts, or a plain mean as in SpeechBrain.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from speechbrain import Stage
from speechbrain.dataio.dataloader import LoopedLoader
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from torch import nn
from torch.utils.data import DataLoader

from sbkit.audio.draws import seeded_draws
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.rng import State, random_state, restore_random_state
from sbkit.data.batch import Batch, Loaders
from sbkit.data.sampler import TrainSampler
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.evaluate.slices import slice_columns
from sbkit.logs.metric import best_key
from sbkit.logs.progress import Progress, shown
from sbkit.train.evaluation import (
    PHASES,
    evaluate_splits,
    gather_results,
    log_validation,
    mean_over_ranks,
    report_test,
    validation_error,
)
from sbkit.train.metrics import ZERO, MetricTotals, TrainingMetrics
from sbkit.train.moving_average import agree_on_buffers
from sbkit.train.nonfinite import ids_of
from sbkit.train.profiling import profiled
from sbkit.train.schedule import length_of, mark_last, share_of_steps
from sbkit.train.scoring import stops_early
from sbkit.train.step import StepBrain, as_loss
from sbkit.train.stopping import SaveOrLeave
from sbkit.train.watchdog import NullWatchdog, Watchdog

logger = logging.getLogger(__name__)

STALL_SECONDS = 120.0
COUNTERS = ("step", "optimizer_step", "nonfinite_count")
LOG_EVERY = 10  # optimizer steps between two readings of the device, unless `log_every` says more


@register_checkpoint_hooks
class Brain(StepBrain):
    """Train and evaluate what a recipe defines; takes the arguments of SpeechBrain's Brain.

    Attributes:
        loaders: those of the run, where a `Run` made the Brain.
        signals, watchdog: what asks the run to stop, and what ends one that hangs.
        averaged: how many checkpoints it is tested with.
    """

    loaders: Loaders | None = None
    averaged: int = 1

    def __init__(
        self,
        modules: dict[str, nn.Module] | None = None,
        opt_class: Any = None,
        hparams: dict[str, Any] | None = None,
        run_opts: Any = None,
        checkpointer: Any = None,
    ) -> None:
        super().__init__(modules, opt_class, hparams, run_opts, checkpointer)
        self._training_metrics = TrainingMetrics(self.device)
        self.between = SaveOrLeave(
            None if checkpointer is None else self._save_intra_epoch_ckpt,
            minutes=self.ckpt_interval_minutes,
            steps=self.ckpt_interval_steps,
        )
        self.signals = self.between.signals
        self.watchdog = NullWatchdog()
        self._profiles = rank() == 0 and self._declared("profile", False)  # the first epoch
        self._resume_rng: State | None = None  # of the checkpoint, until it is set
        self._saved_accumulation: int | None = None  # likewise
        self._keeps_counters = False  # while an earlier checkpoint is loaded
        self._steps_of_epoch = 0
        self._valid_set: Mapping[str, Any] = {}  # of the last fit

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
        train_set = self._loaders(train_set, Stage.TRAIN, train_loader_kwargs)["train"]
        if valid_set is not None:
            valid_set = self._valid_set = self._loaders(valid_set, Stage.VALID, valid_loader_kwargs)
        enable = not self.noprogressbar if progressbar is None else progressbar
        try:
            with self._watchdog() as self.watchdog:
                if isinstance(self.checkpointer, Checkpointer):
                    self.checkpointer.claim()
                self.on_fit_start()  # asked to stop in it, a run leaves at once: nothing is trained
                if self.step == 0:
                    self._resume_random()
                self._open_metrics(epoch_counter, train_set)
                with self.signals:
                    self._fit_epochs(epoch_counter, train_set, valid_set, enable)
        finally:
            self._training_metrics.close()
            self._unwrap_distributed()

    def _fit_epochs(
        self, epoch_counter: Iterable[int], train_set: Any, valid_set: Any, enable: bool
    ) -> None:
        for epoch in epoch_counter:
            if self.step == 0 and stops_early(self, self._declared("early_stopping", 0)):
                break
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

        Without a key the checkpoints say by which figure they were saved.
        """
        test_set = self._loaders(test_set, Stage.TEST, test_loader_kwargs)
        is_told = max_key is not None or min_key is not None
        keys = {"max_key": max_key, "min_key": min_key} if is_told else self._best_keys()
        self.on_evaluate_start(**keys)
        with self.signals, self._watchdog() as self.watchdog:
            return self._evaluate_stage(test_set, Stage.TEST, None)

    def load_best(self, valid_set: Any) -> None:
        """Load what a test would be run with, without training or testing anything."""
        self._valid_set = self._loaders(valid_set, Stage.VALID, None)
        with self._watchdog() as self.watchdog:
            self.on_evaluate_start(**self._best_keys())

    def _best_keys(self) -> dict[str, str | None]:
        """Name the figure that chooses the best checkpoint, as a Checkpointer takes it."""
        if type(self).metrics:
            return best_key(type(self).metrics)._asdict()
        ours = isinstance(self.checkpointer, Checkpointer)
        return {**self.checkpointer.ranked_by()} if ours else {}

    # -- training -----------------------------------------------------------------------------

    def _fit_train(self, train_set: Any, epoch: int, enable: bool) -> None:
        self.on_stage_start(Stage.TRAIN, epoch)
        self._counts = None  # of a step that an epoch left open
        self._training_metrics.start_epoch(afresh=self.step == 0)
        if self.step == 0:
            self.nonfinite_count = 0
        self.train_mode()
        self.freeze_parts()
        self.zero_grad(set_to_none=True)
        self._choose_epoch(train_set, epoch)
        count = length_of(train_set)
        log_every = self._declared("log_every", LOG_EVERY)
        self.share_step()
        batches = iter(train_set)
        self._resume_random()  # after the loader's draw, which the saved state has behind it
        marked = mark_last(batches, count=count, done=self.step)
        timed = self._training_metrics.meter.timed(marked)
        if self._profiles and self._run_folder is not None:
            timed, self._profiles = profiled(timed, self._run_folder, self.device), False
        for batch, is_last in timed:
            if self._optimizer_step_limit_exceeded:
                break
            self.epoch_share = share_of_steps(self.step, count, self.grad_accumulation_factor)
            self.watchdog.ping("step", self.optimizer_step, ids_of(batch))
            self.step, self._is_last = self.step + 1, is_last
            steps_before = self.optimizer_step
            objective = self.fit_batch(batch)
            seconds = batch.seconds if isinstance(batch, Batch) else 0.0
            self._training_metrics.meter.add(as_loss(objective), seconds)
            if has_stepped := self.optimizer_step > steps_before:
                self.freeze_parts()
            if has_stepped and self.optimizer_step % log_every == 0:
                self._log_step(epoch, live=enable)
            if self.debug and self.step >= self.debug_batches:
                break
            if self.should_step:
                self.between.after_step(self.optimizer_step, is_last=is_last)
            self.watchdog.ping("data", self.optimizer_step)
        self._read()
        self.zero_grad(set_to_none=True)
        self._steps_of_epoch = self.step
        self._training_metrics.end_epoch()
        self.on_stage_end(Stage.TRAIN, self._training_metrics.so_far.loss, epoch)
        self.avg_train_loss, self.step = 0.0, 0

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the best checkpoint, or the mean of the `average_checkpoints` best.

        The counters stay those of the whole run.
        """
        self._keeps_counters = True
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        self._keeps_counters = False
        count = int(self._declared("average_checkpoints", 1))
        if count > 1 and isinstance(self.checkpointer, Checkpointer):
            valid = self._valid_set
            score = partial(validation_error, self, valid) if valid else None
            averaged = self.checkpointer.load_average(
                count, score, max_key=max_key, min_key=min_key
            )
            if averaged is not None:
                self.averaged = len(averaged.checkpoints)
                if score is not None:
                    logger.info(str(averaged))

    # -- evaluation ---------------------------------------------------------------------------

    def _fit_valid(self, valid_set: Any, epoch: int, enable: bool) -> None:
        """Validate. A recipe may override this, to do it less often; hence the arguments."""
        if valid_set is not None:
            self._evaluate_stage(valid_set, Stage.VALID, epoch)

    def _evaluate_stage(self, loaders: Mapping[str, Any], stage: Stage, epoch: int | None) -> float:
        self.on_stage_start(stage, epoch)
        losses = evaluate_splits(self, loaders, stage, phase=stage.name.lower())
        steps, self.step = self.step, 0
        if any(gather_over_ranks(self.signals.received is not None)):
            self._leave_evaluation(stage)
        mean = mean_over_ranks(losses)
        self.step = steps if stage is Stage.TEST else 0  # as SpeechBrain has it
        self.on_stage_end(stage, mean, epoch)
        self.step = 0
        return mean

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Return what `compute_objectives` makes of one batch, a Loss or a mean, on the CPU."""
        batch = self.placed(batch)
        with seeded_draws(ids_of(batch)), self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage=stage)
            objective = self.compute_objectives(outputs, batch, stage=stage)
        if type(self).metrics:
            self._results.setdefault(self._split, []).extend(self.score(outputs, batch))
        names = self._declared("report_by", [])
        if names and stage is Stage.TEST and isinstance(batch, Batch):
            samples, rate = batch.audio_lengths.tolist(), self.hparams.sample_rate
            columns = slice_columns(names, batch.columns, samples, rate, batch.clips())
            self._columns.setdefault(self._split, []).extend(columns)
        return (as_loss(objective) if isinstance(objective, Mapping) else objective).detach().cpu()

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Log, show and save after validation, and report after the test."""
        if stage is Stage.TRAIN:
            return
        if stage is Stage.TEST:
            report_test(self, gather_results(self._results))
        else:
            log_validation(self, gather_results(self._results), stage_loss, epoch or 0)

    # -- parts of the loop --------------------------------------------------------------------

    def pinging(self, batches: Iterable[Any], phase: str) -> Iterator[Any]:
        """Yield batches, and ping the watchdog at each, outside the training loop."""
        quiet, title = self.noprogressbar, PHASES.get(phase, phase)
        with shown(title, length_of(batches), quiet=quiet) as advance:
            for batch in batches:
                self.watchdog.ping(phase, self.optimizer_step, ids_of(batch))
                yield batch
                advance(1)

    def _choose_epoch(self, train_set: Any, epoch: int) -> None:
        """Set on the sampler the epoch and, after a resume, where in it the run stands."""
        sampler = getattr(train_set, "batch_sampler", None)
        self._is_planned = isinstance(sampler, TrainSampler)
        self._nonfinite.epoch = epoch
        if isinstance(sampler, TrainSampler):
            if self._saved_accumulation is not None:  # other micro-batches of the same steps
                steps = self.step // self._saved_accumulation
                self.step = steps * self.grad_accumulation_factor
            sampler.set_epoch(epoch, start=self.step)
        elif hasattr(self.train_sampler, "set_epoch"):
            self.train_sampler.set_epoch(epoch)
        self._saved_accumulation = None

    def _log_step(self, epoch: int, *, live: bool) -> None:
        optimizers = self._active_optimizers().values()
        rate = next((each.param_groups[0]["lr"] for each in optimizers), 0.0)
        reading = self._read()
        self._training_metrics.log_step(epoch, self.optimizer_step, reading, rate=rate, live=live)

    def _read(self) -> MetricTotals:
        """Read the losses accumulated since the last reading, and which steps were skipped."""
        self._read_skipped()
        reading = self._training_metrics.read()
        self.avg_train_loss = self._training_metrics.so_far.loss
        return reading

    def _open_metrics(self, epochs: Any, train_set: Any) -> None:
        total = getattr(epochs, "limit", None) or length_of(epochs) or 0
        steps = -(-(length_of(train_set) or 0) // self.grad_accumulation_factor)
        metrics, epoch = type(self).metrics, getattr(epochs, "current", 0) + (self.step > 0)
        progress = Progress(total_epochs=total, total_steps=total * steps, metrics=metrics)
        if self.optimizer_step and (self.step or epoch < total):
            logger.info(
                f"Resuming after step {self.optimizer_step}, in epoch {epoch + (not self.step)}."
            )
        self._training_metrics.open(
            self._run_folder,
            progress,
            resume_step=self.optimizer_step,
            within_epoch=self.step > 0,
        )

    # -- between two steps --------------------------------------------------------------------

    def _leave_evaluation(self, stage: Stage) -> None:
        """Leave without the figures; a run that goes on validates again."""
        if stage is Stage.VALID:
            self.step = self._steps_of_epoch
            self.between.save()
        self.between.leave(self.optimizer_step)

    def _watchdog(self) -> NullWatchdog:
        seconds, folder = self._declared("stall_seconds", STALL_SECONDS), self._run_folder
        if folder is None or not seconds:
            return NullWatchdog()
        return Watchdog(folder, stall_seconds=seconds)

    def _loaders(self, data: Any, stage: Stage, options: dict[str, Any] | None) -> dict[str, Any]:
        """Return the loader of each split by its name; a set without one is named as the stage."""
        named = data if isinstance(data, Mapping) else {stage.name.lower(): data}
        in_checkpoints = {} if stage is Stage.TRAIN else {"ckpt_prefix": None}
        return {
            name: each
            if isinstance(each, DataLoader | LoopedLoader)
            else self.make_dataloader(each, stage, **{**(options or {}), **in_checkpoints})
            for name, each in named.items()
        }

    # -- checkpoints --------------------------------------------------------------------------

    def _save_intra_epoch_ckpt(self) -> None:
        """Save, also what the device was not yet asked for."""
        self.watchdog.ping("checkpoint", self.optimizer_step)
        agree_on_buffers(self.modules)  # the file has those of one rank
        self._read_skipped()
        self._training_metrics.unread = self._training_metrics.meter.peek()
        with self.moving_average.applied():
            super()._save_intra_epoch_ckpt()
        self._training_metrics.unread = ZERO

    @mark_as_saver  # type: ignore[untyped-decorator]
    def _save(self, path: str | Path) -> None:
        """Write where the run stands: counters, sums of metrics, random state."""
        state = {name: getattr(self, name) for name in COUNTERS}
        state["accumulation"] = self.grad_accumulation_factor
        state |= self._training_metrics.state() | {"random": random_state(self.device)}
        Path(path).write_text(json.dumps(state))

    @mark_as_loader  # type: ignore[untyped-decorator]
    def _recover(self, path: str | Path, end_of_epoch: bool) -> None:
        """Set the Brain to where the run stood."""
        if self._keeps_counters:
            return
        text = Path(path).read_text()  # SpeechBrain's is YAML, with fewer counters
        state = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
        for name in COUNTERS:
            setattr(self, name, int(state.get(name, getattr(self, name))))
        self._training_metrics.restore(state)
        self._resume_rng = state.get("random")
        self._saved_accumulation = state.get("accumulation")

    def _resume_random(self) -> None:
        """Go on drawing where the run stood when it was saved."""
        if self._resume_rng is not None:
            restore_random_state(self._resume_rng, self.device)
            self._resume_rng = None
