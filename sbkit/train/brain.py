"""The training loop: SpeechBrain's Brain with its ways kept, exact where it is not.

A recipe overrides `compute_forward` and `compute_objectives`, and as much of `on_stage_start`,
`on_stage_end` and `on_fit_batch_start` as it needs. `compute_objectives` gives a `Loss` of sums and
counts, or a plain mean as in SpeechBrain.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

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

from sbkit.base.errors import ASKED_TO_STOP
from sbkit.checkpoint.brain_state import check_brain_state
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.rng import State, random_state, restore_random_state, torch_state
from sbkit.data.sampler import TrainSampler
from sbkit.distributed.device import resolve
from sbkit.distributed.ranks import gather_over_ranks, world_size
from sbkit.logs.log import say
from sbkit.models.loss import Loss
from sbkit.train.buffers import RunningStatistics
from sbkit.train.freeze import Frozen, with_lr_scale
from sbkit.train.gradients import clip, normalize_by_tokens, step_unless
from sbkit.train.meter import MetricTotals
from sbkit.train.metrics import TrainingMetrics
from sbkit.train.nonfinite import NonFiniteRecorder, ids_of
from sbkit.train.options import declared_options
from sbkit.train.step import DdpStep, ForwardLoss, as_loss, average_statistics
from sbkit.train.stopping import RankConsensus, StopSignals
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
    """

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
        self.metrics = TrainingMetrics(self.device)
        self.nonfinite_count = 0  # bad steps of this epoch
        self.signals, self.consensus = StopSignals(), RankConsensus()
        self.watchdog = NullWatchdog()
        self.nonfinite = NonFiniteRecorder(self._run_folder, self.modules)
        self.buffers = RunningStatistics(self.modules)
        self.epoch_share = 0.0  # of the current epoch, before the current step
        self.step, self.optimizer_step = 0, 0  # micro-batches of the epoch, steps of the run
        self._steps_of_epoch, self._last_save = 0, time.monotonic()
        self._is_last = False  # micro-batch of its epoch
        # Of the current step, on this rank: its labels, and its losses that were not finite.
        self._counts = torch.zeros(2, device=self.device)
        self._lost = torch.zeros((), device=self.device)  # such losses over all ranks
        self._valid_set: Any = None  # of the last fit
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
        """Train and validate epoch after epoch, from wherever the last checkpoint stands."""
        if self.test_only:
            return
        train_set = self._loader(train_set, Stage.TRAIN, train_loader_kwargs)
        valid_set = self._loader(valid_set, Stage.VALID, valid_loader_kwargs)
        self._valid_set = valid_set
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
            self.metrics.close()
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
        """Load the best checkpoint, evaluate, and give the mean loss."""
        test_set = self._loader(test_set, Stage.TEST, test_loader_kwargs)
        self.on_evaluate_start(max_key=max_key, min_key=min_key)
        with self.signals, self._watchdog() as self.watchdog:
            return self._evaluate_stage(test_set, Stage.TEST, None)

    # -- training -----------------------------------------------------------------------------

    def _fit_train(self, train_set: Any, epoch: int, enable: bool) -> None:
        self.on_stage_start(Stage.TRAIN, epoch)
        if self.step == 0:
            self.nonfinite_count = 0
        self.metrics.start_epoch(afresh=self.step == 0)
        self.modules.train()
        self.frozen.eval()
        self.zero_grad(set_to_none=True)
        self._choose_epoch(train_set, epoch)
        self._counts.zero_()
        count = length_of(train_set)
        log_every = self._declared("log_every", LOG_EVERY)
        batches = iter(train_set)
        self._resume_random()  # in mid-epoch: the loader has drawn a seed that lies behind
        marked = mark_last(batches, count=count, done=self.step)
        for batch, is_last in self.metrics.meter.timed(marked):
            if self._optimizer_step_limit_exceeded:
                break
            self.epoch_share = share_of_steps(self.step, count, self.grad_accumulation_factor)
            self.watchdog.ping("step", self.optimizer_step, ids_of(batch))
            self._wrap_step(batch)
            self.step, self._is_last = self.step + 1, is_last
            steps_before = self.optimizer_step
            objective = self.fit_batch(batch)
            self.metrics.meter.add(as_loss(objective), getattr(batch, "seconds", 0.0))
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
        self.on_stage_end(Stage.TRAIN, self.metrics.so_far.loss, epoch)
        self.avg_train_loss, self.step = 0.0, 0

    @property
    def should_step(self) -> bool:
        """Tell whether the optimizer steps with this micro-batch: every so many, and the last."""
        return self._is_last or self.step % self.grad_accumulation_factor == 0

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the best checkpoint, or the mean of the `average_checkpoints` best.

        The counters stay those of the whole run.
        """
        counters = {name: getattr(self, name) for name in (*COUNTERS, "_recovered")}
        figures = self.metrics.state()
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        count = int(self._declared("average_checkpoints", 1))
        if count > 1 and isinstance(self.checkpointer, Checkpointer):
            score = None if self._valid_set is None else self.validation_error
            averaged = self.checkpointer.load_average(
                count, score, max_key=max_key, min_key=min_key
            )
            if averaged is not None and score is not None:
                say(str(averaged))
        for name, value in counters.items():
            setattr(self, name, value)
        self.metrics.restore(figures)

    def validation_error(self) -> float:
        """Return the mean loss of the validation set with the weights as they are.

        A recipe overrides this where another measure, lower is better, chooses its best checkpoint.
        """
        self.on_stage_start(Stage.VALID)
        self.modules.eval()
        batches = self.pinging(self._valid_set, "averaging")
        return mean_over_ranks(as_loss(self.evaluate_batch(each, Stage.VALID)) for each in batches)

    def fit_batch(self, batch: Any) -> Any:
        """Add one micro-batch's gradient, and step when the batch of the optimizer is whole.

        Gives what `compute_objectives` gave, a Loss or a mean, without its graph; so may a recipe
        that overrides this. `optimizers_step` expects the gradient of a mean.
        """
        placed = self._placed(batch)
        if (self.step - 1) % self.grad_accumulation_factor == 0:  # the first of its step
            self.buffers.save()
        self.on_fit_batch_start(placed, self.should_step)
        random = torch_state(self.device)
        with self.no_sync(not self.should_step):
            with self.training_ctx:
                outputs, objective = self._ddp_step(placed)
            loss = as_loss(objective)
            total = loss.sums.sum()
            torch.autograd.backward(self.scaler.scale(total))
        self.nonfinite.record(batch, random, total, self.step)
        self._counts += torch.stack([loss.counts.sum(), ~total.isfinite()])
        if self.should_step:
            self._lost = normalize_by_tokens(self._active_optimizers(), self._counts)
            self._counts.zero_()
            self.optimizers_step()
            self.modules.zero_grad(set_to_none=True)  # a frozen optimizer's would pile up
        self.on_fit_batch_end(placed, outputs, objective, self.should_step)
        return objective.detach()

    def optimizers_step(self) -> None:
        """Unscale, clip by one norm, step unless the norm is not finite, update."""
        optimizers = self._active_optimizers()
        if not optimizers:
            return
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
        skipped = ~clip(optimizers, self.max_grad_norm).isfinite()
        for optimizer in optimizers:
            step_unless(skipped, optimizer, self.scaler)
        self.buffers.restore(skipped)
        self.scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        self.nonfinite.end_step(self.optimizer_step, torch.stack([self._lost, skipped]))
        if self.device_type == "cpu":  # nothing to wait for, and the weights are still the step's
            self._look_for_bad_steps()

    def _look_for_bad_steps(self) -> None:
        """Count the steps that were skipped, and stop when too many of them were bad."""
        skipped, bad = self.nonfinite.flush(overflow_is_usual=self.scaler.is_enabled())
        self.metrics.meter.skipped += skipped
        self.nonfinite_count += bad
        self.nonfinite.refuse_more(self.nonfinite_count, self.nonfinite_patience)

    def _active_optimizers(self) -> list[Optimizer]:
        """List the optimizers that step now: `init_optimizers` makes several, one, or none."""
        if self.optimizers_dict is not None:
            return list(self.freeze_optimizers(self.optimizers_dict).values())
        return [self.optimizer] if self.opt_class is not None else []

    # -- evaluation ---------------------------------------------------------------------------

    def _fit_valid(self, valid_set: Any, epoch: int, enable: bool) -> None:
        """Validate. A recipe may override this, to do it less often; hence the arguments."""
        if valid_set is not None:
            self._evaluate_stage(valid_set, Stage.VALID, epoch)

    @torch.no_grad()
    def _evaluate_stage(self, loader: Any, stage: Stage, epoch: int | None) -> float:
        self.on_stage_start(stage, epoch)
        self.modules.eval()
        average_statistics(self.modules)
        losses = []
        for batch in self.pinging(loader, stage.name.lower()):
            if self.signals.heard:
                break
            self.step += 1
            losses.append(as_loss(self.evaluate_batch(batch, stage)))
            if self.debug and self.step >= self.debug_batches:
                break
        steps, self.step = self.step, 0
        if any(gather_over_ranks(self.signals.heard is not None)):
            self._leave_evaluation(stage)
        mean = mean_over_ranks(losses)
        self.step = steps if stage is Stage.TEST else 0  # as SpeechBrain has it
        self.on_stage_end(stage, mean, epoch)
        self.step = 0
        return mean

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, stage: Stage) -> Any:
        """Give what `compute_objectives` gives of one batch, a Loss or a mean, on the CPU."""
        batch = self._placed(batch)
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage=stage)
            objective = self.compute_objectives(outputs, batch, stage=stage)
        return objective.detach().cpu()

    # -- parts of the loop --------------------------------------------------------------------

    def pinging(self, batches: Iterable[Any], phase: str) -> Iterator[Any]:
        """Walk batches with a sign of life at each, outside the training loop."""
        for batch in batches:
            self.watchdog.ping(phase, self.optimizer_step, ids_of(batch))
            yield batch

    def _choose_epoch(self, train_set: Any, epoch: int) -> None:
        """Tell the sampler the epoch and, after a resume, where in it the run stands."""
        sampler = getattr(train_set, "batch_sampler", None)
        self.nonfinite.begin_epoch(sampler, epoch)
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
        self.metrics.log_step(epoch, self.optimizer_step, reading, rate=rate, live=live)

    def _read(self) -> MetricTotals:
        """Ask the device what was lost since the last reading, and which steps were bad."""
        self._look_for_bad_steps()
        reading = self.metrics.read()
        self.avg_train_loss = self.metrics.so_far.loss
        return reading

    def log_epoch(self, epoch: int, *, dev_loss: float, cer: float, wer: float) -> None:
        """Write an epoch's figures to the log and the screen; recipes call it after validation."""
        self.metrics.log_epoch(epoch, self.optimizer_step, dev_loss=dev_loss, cer=cer, wer=wer)

    def _open_metrics(self, epochs: Any, train_set: Any) -> None:
        total_epochs = getattr(epochs, "limit", None) or length_of(epochs) or 0
        steps = -(-(length_of(train_set) or 0) // self.grad_accumulation_factor)
        self.metrics.open(
            self._run_folder,
            resume_step=self.optimizer_step,
            total_epochs=total_epochs,
            total_steps=total_epochs * steps,
            within_epoch=self.step > 0,
        )

    # -- between two steps --------------------------------------------------------------------

    def _save_or_leave(self, is_last: bool) -> None:
        """Save within the epoch where it is time; save and leave where any rank was asked to."""
        by_steps, minutes = self.ckpt_interval_steps, self.ckpt_interval_minutes
        passed = time.monotonic() - self._last_save
        agreed = self.consensus.ask(
            stop=self.signals.heard is not None,
            save=minutes > 0 and passed > 60 * minutes,
            at_once=is_last,
        )
        by_step = by_steps > 0 and self.optimizer_step % by_steps == 0
        if agreed.stop or ((by_step or agreed.save) and not is_last):
            self._save_here()
        if agreed.stop:
            self._leave()

    def _save_here(self) -> None:
        self._last_save = time.monotonic()
        if self.checkpointer is not None:
            self.watchdog.ping("checkpoint", self.optimizer_step)
            self._look_for_bad_steps()
            self._save_intra_epoch_ckpt()

    def _leave_evaluation(self, stage: Stage) -> None:
        """Leave without the figures; a run that goes on validates again."""
        if stage is Stage.VALID:
            self.step = self._steps_of_epoch
            self._save_here()
        self._leave()

    def _leave(self) -> NoReturn:
        say(
            f"Asked to stop after step {self.optimizer_step}. "
            + ("It is saved; the same command goes on." if self.checkpointer else "Nothing saves.")
        )
        raise SystemExit(ASKED_TO_STOP)

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

    def _wrap_step(self, batch: Any) -> None:
        """Share the step once, when there is a batch to see its unused parameters by."""
        if world_size() == 1 or self._ddp_step.is_wrapped or self._has_own_step():
            return
        unused = self._ddp_step.wrap(self._placed(batch))
        if unused:
            say(
                f"{len(unused)} parameters take no part in the loss and stay as they are: "
                f"{unused[0]} to {unused[-1]}. If they will, declare find_unused_parameters: True."
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
        with self.metrics.unread_kept():
            super()._save_intra_epoch_ckpt()

    @mark_as_saver  # type: ignore[untyped-decorator]
    def _save(self, path: str | Path) -> None:
        state = {name: getattr(self, name) for name in COUNTERS}
        state |= self.metrics.state()
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
        self.metrics.restore(state)
        self._recovered = state.get("random")

    def _resume_random(self) -> None:
        """Go on drawing where the run stood when it was saved."""
        if self._recovered is not None:
            restore_random_state(self._recovered, self.device)
            self._recovered = None


def mean_over_ranks(losses: Iterable[Loss]) -> float:
    """Divide all sums by all counts, the same to the last digit however they were shared out."""
    losses = list(losses)
    sums = [value for loss in losses for value in loss.sums.tolist()]
    counts = [value for loss in losses for value in loss.counts.tolist()]
    everyone = gather_over_ranks((sums, counts))
    total = math.fsum(value for sums, _ in everyone for value in sums)
    labels = math.fsum(value for _, counts in everyone for value in counts)
    return total / labels if labels else math.nan
