"""The training loop: SpeechBrain's Brain with its ways kept, exact where it is not.

A recipe overrides `compute_forward` and `compute_objectives`, and as much of `on_stage_start`,
`on_stage_end` and `on_fit_batch_start` as it needs. `compute_objectives` gives a `Loss` of sums and
counts, or a plain mean as in SpeechBrain.
"""

import json
import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import speechbrain as sb
import torch
from speechbrain import Stage
from speechbrain.dataio.dataloader import LoopedLoader
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from speechbrain.utils.run_opts import RunOptions
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from sbkit.data.sampler import TrainSampler
from sbkit.machine.gradients import clip, divide_once
from sbkit.machine.meter import NOTHING, Meter, Reading
from sbkit.machine.step import StepGraph, as_loss, freeze_unused, length_of, mark_last, share_step
from sbkit.nn.loss import Loss
from sbkit.state.checkpoint import Checkpointer
from sbkit.tensors.device import resolve
from sbkit.tensors.distributed import gather_over_ranks, rank, world_size
from sbkit.tensors.log import EpochFigures, QuietLog, RunLog, StepFigures, say
from sbkit.tensors.progress import Progress

LOG_EVERY = 10  # optimizer steps between two readings of the device, unless `log_every` says more
COUNTERS = ("step", "optimizer_step", "train_seconds", "audio_seconds")


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
        super().__init__(modules, opt_class, hparams, options, checkpointer)
        self.device, self.device_type = placement.device, placement.device.type
        self.training_ctx, self.evaluation_ctx = placement.autocast(), evaluation.autocast()
        self.scaler = placement.grad_scaler()
        self.meter = Meter(self.device)
        self.so_far = NOTHING  # of this epoch
        self.train_seconds, self.audio_seconds = 0.0, 0.0  # of the whole run
        self.epoch_share = 0.0  # of the current epoch, before the current step
        self.step, self.optimizer_step = 0, 0  # micro-batches of the epoch, steps of the run
        self.should_step = True
        self._step_graph: nn.Module = self._step()
        self.log, self.progress = QuietLog(), Progress(total_epochs=0, total_steps=0)

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
        self._freeze_unused(train_set)
        self.on_fit_start()
        self._open_log(epoch_counter, train_set)
        try:
            for epoch in epoch_counter:
                self._fit_train(train_set, epoch)
                self._fit_valid(valid_set, epoch)
                if self._optimizer_step_limit_exceeded or (
                    self.debug and epoch >= self.debug_epochs
                ):
                    break
        finally:
            self.progress.close()
            self.log.close()
            # A reducer that outlives the process group ends some runs with SIGABRT at exit.
            self._step_graph = self._step()

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
        return self._evaluate_stage(test_set, Stage.TEST, None)

    # -- training -----------------------------------------------------------------------------

    def _fit_train(self, train_set: Any, epoch: int) -> None:
        self.on_stage_start(Stage.TRAIN, epoch)
        if self.step == 0:
            self.so_far = NOTHING
        self.modules.train()
        self.zero_grad(set_to_none=True)
        self._choose_epoch(train_set, epoch)
        self._labels = torch.zeros((), device=self.device)
        count = length_of(train_set)
        last_save, log_every = time.monotonic(), self._declared("log_every", LOG_EVERY)
        self.meter.read()  # what passed since the last epoch is none of this one's
        marked = mark_last(train_set, count=count, done=self.step)
        for batch, is_last in self.meter.timed(marked):
            if self._optimizer_step_limit_exceeded:
                break
            self.epoch_share = self.step / count if count else 0.0
            self.step += 1
            self.should_step = is_last or self.step % self.grad_accumulation_factor == 0
            self.fit_batch(batch)
            if self.should_step and self.optimizer_step % log_every == 0:
                self._log_step(epoch)
            if self.debug and self.step >= self.debug_batches:
                break
            if self.should_step and not is_last and self._save_is_due(last_save):
                self._save_intra_epoch_ckpt()
                last_save = time.monotonic()
        self._take_reading()
        self.zero_grad(set_to_none=True)
        self.step = 0
        self.on_stage_end(Stage.TRAIN, self.so_far.loss, epoch)

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the best checkpoint, or the mean of the `average_checkpoints` best.

        The counters stay those of the whole run.
        """
        counters = {name: getattr(self, name) for name in (*COUNTERS, "so_far")}
        super().on_evaluate_start(max_key=max_key, min_key=min_key)
        count = int(self._declared("average_checkpoints", 1))
        if count > 1 and isinstance(self.checkpointer, Checkpointer):
            self.checkpointer.load_average(count, max_key=max_key, min_key=min_key)
        for name, value in counters.items():
            setattr(self, name, value)

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """Add one micro-batch's gradient, and step when the batch of the optimizer is whole."""
        batch = self._placed(batch)
        self.on_fit_batch_start(batch, self.should_step)
        with self.no_sync(not self.should_step):
            with self.training_ctx:
                outputs, objective = self._step_graph(batch)
            loss = as_loss(objective)
            total = loss.sums.sum()
            torch.autograd.backward(self.scaler.scale(total))
        self._labels += loss.counts.sum()
        self.meter.add(loss, getattr(batch, "seconds", 0.0))
        if self.should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, objective, self.should_step)
        return total.detach()

    def optimizers_step(self) -> None:
        """Unscale, divide by the labels of all ranks, clip by one norm, step, update."""
        optimizers = list(self.freeze_optimizers(self.optimizers_dict).values())
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
        divide_once(optimizers, self._labels)
        clip(optimizers, self.max_grad_norm)
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._labels.zero_()
        self.optimizer_step += 1

    # -- evaluation ---------------------------------------------------------------------------

    def _fit_valid(self, valid_set: Any, epoch: int) -> None:
        if valid_set is not None:
            self._evaluate_stage(valid_set, Stage.VALID, epoch)

    @torch.no_grad()
    def _evaluate_stage(self, loader: Any, stage: Stage, epoch: int | None) -> float:
        self.on_stage_start(stage, epoch)
        self.modules.eval()
        losses = []
        for batch in loader:
            losses.append(self.evaluate_batch(batch, stage))
            self.step += 1
            if self.debug and self.step >= self.debug_batches:
                break
        self.step = 0
        mean = mean_over_ranks(losses)
        self.on_stage_end(stage, mean, epoch)
        return mean

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, stage: Stage) -> Loss:
        """Give the loss of one batch, as sums and counts on the CPU."""
        batch = self._placed(batch)
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage=stage)
            loss = as_loss(self.compute_objectives(outputs, batch, stage=stage))
        return Loss(loss.sums.cpu(), loss.counts.cpu())

    # -- parts of the loop --------------------------------------------------------------------

    def _choose_epoch(self, train_set: Any, epoch: int) -> None:
        """Tell the sampler the epoch and, after a resume, where in it the run stands."""
        sampler = getattr(train_set, "batch_sampler", None)
        if isinstance(sampler, TrainSampler):
            sampler.set_epoch(epoch, start=self.step)
        elif hasattr(self.train_sampler, "set_epoch"):
            self.train_sampler.set_epoch(epoch)

    def _placed(self, batch: Any) -> Any:
        return batch.to(self.device) if hasattr(batch, "to") else batch

    def _log_step(self, epoch: int) -> None:
        reading = self._take_reading()
        figures = StepFigures(
            epoch=epoch,
            step=self.optimizer_step,
            loss=reading.loss,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            xrt=reading.xrt,
            waiting=reading.waiting,
        )
        self.log.write(figures)
        self.progress.step(figures)

    def _take_reading(self) -> Reading:
        reading = self.meter.read()
        self.so_far += reading
        self.train_seconds += reading.wall_seconds
        self.audio_seconds += reading.audio_seconds
        return reading

    def log_epoch(self, epoch: int, *, dev_loss: float, cer: float, wer: float) -> None:
        """Write an epoch's figures to the log and the screen; recipes call it after validation."""
        figures = EpochFigures(
            epoch=epoch,
            step=self.optimizer_step,
            loss=self.so_far.loss,
            xrt=self.so_far.xrt,
            dev_loss=dev_loss,
            cer=cer,
            wer=wer,
        )
        self.log.write(figures)
        self.progress.epoch(figures)

    def _open_log(self, epochs: Any, train_set: Any) -> None:
        """Open the log where the run stands: behind the checkpoint that it starts from."""
        total_epochs = getattr(epochs, "limit", None) or len(epochs)
        steps = -(-(length_of(train_set) or 0) // self.grad_accumulation_factor)
        folder = self._declared("output_folder", None)
        if rank() == 0 and folder is not None:
            self.log = RunLog(Path(folder), resume_step=self.optimizer_step)
        self.progress = Progress(total_epochs=total_epochs, total_steps=total_epochs * steps)

    def _save_is_due(self, last_save: float) -> bool:
        minutes, steps = self.ckpt_interval_minutes, self.ckpt_interval_steps
        if self.checkpointer is None:
            return False
        by_steps = steps > 0 and self.optimizer_step % steps == 0
        by_time = minutes > 0 and time.monotonic() - last_save > 60 * minutes
        return by_steps or (minutes > 0 and bool(gather_over_ranks(by_time)[0]))

    def _declared(self, name: str, default: Any) -> Any:
        return getattr(getattr(self, "hparams", None), name, default)

    def _loader(self, data: Any, stage: Stage, options: dict[str, Any] | None) -> Any:
        if data is None or isinstance(data, DataLoader | LoopedLoader):
            return data
        prefix = {} if stage is Stage.TRAIN else {"ckpt_prefix": None}
        return self.make_dataloader(data, stage, **prefix, **(options or {}))

    # -- processes ----------------------------------------------------------------------------

    def _wrap_distributed(self) -> None:
        self._step_graph = share_step(self._step(), self.device)

    def _step(self) -> StepGraph:
        return StepGraph(
            modules=self.modules, predict=self.compute_forward, lose=self.compute_objectives
        )

    def _freeze_unused(self, train_set: Any) -> None:
        """Before DDP waits for gradients that never come, find out which, and say it."""
        if world_size() == 1:
            return
        self.modules.train()
        unused = freeze_unused(self._step(), self._placed(next(iter(train_set))))
        if unused:
            say(
                f"{len(unused)} parameters take no part in the loss and stay as they are: "
                f"{unused[0]} to {unused[-1]}"
            )

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        """Leave gradients on this rank while a batch is still being accumulated."""
        if use and isinstance(self._step_graph, DistributedDataParallel):
            return self._step_graph.no_sync()
        return nullcontext()

    # -- checkpoints --------------------------------------------------------------------------

    @mark_as_saver  # type: ignore[untyped-decorator]
    def _save(self, path: str | Path) -> None:
        state = {name: getattr(self, name) for name in COUNTERS}
        state["so_far"] = vars(self.so_far)
        Path(path).write_text(json.dumps(state))

    @mark_as_loader  # type: ignore[untyped-decorator]
    def _recover(self, path: str | Path, end_of_epoch: bool) -> None:
        state = json.loads(Path(path).read_text())
        self.so_far = Reading(**state.pop("so_far"))
        for name, value in state.items():
            setattr(self, name, value)


def mean_over_ranks(losses: Iterable[Loss]) -> float:
    """Divide all sums by all counts, the same to the last digit however they were shared out."""
    losses = list(losses)
    sums = [value for loss in losses for value in loss.sums.tolist()]
    counts = [value for loss in losses for value in loss.counts.tolist()]
    everyone = gather_over_ranks((sums, counts))
    total = math.fsum(value for sums, _ in everyone for value in sums)
    labels = math.fsum(value for _, counts in everyone for value in counts)
    return total / labels if labels else math.nan


def declared_options(hparams: dict[str, Any] | None, run_opts: Any) -> dict[str, Any]:
    """Collect SpeechBrain's run options: what the caller says, before what the hparams say."""
    if isinstance(run_opts, RunOptions):
        given = {name: run_opts[name] for name in run_opts.overridden_args}
    else:
        given = dict(run_opts or {})
    known = RunOptions().as_dict()
    declared = hparams or {}
    return {**{name: declared[name] for name in known if name in declared}, **given}
