"""The loss and speed of a run: added up, saved in checkpoints, logged and shown."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from sbkit.audio.lengths import sum_dtype
from sbkit.distributed.ranks import (
    gather_over_ranks,
    raise_on_all_ranks,
    rank,
    sum_over_ranks,
    world_size,
)
from sbkit.logs.progress import TrainingProgress
from sbkit.logs.run_log import (
    GRAD_NORM,
    GRAD_SCALE,
    SOURCE_LOSS,
    VALID,
    EpochFigures,
    LoggedFigures,
    RunLog,
    StepFigures,
    require_free_name,
)
from sbkit.models.loss import Amount, Loss

logger = logging.getLogger(__name__)

Batched = TypeVar("Batched")
LOSS_NAME = "loss"
# A GradScaler starts at 2 ** 16, and skips steps until its scale fits.
LOWEST_SCALE, STEPS_TO_FIND_SCALE = 2.0**-10, 30
MAX_SKIPPED_SHARE, MIN_JUDGED_STEPS = 0.2, 10


@dataclass(frozen=True)
class MetricTotals:
    """Sums over all ranks since a meter was last read.

    sums: by name, a sum and its divisor: of the loss, its parts, and all else that is logged.
    """

    sums: Mapping[str, Sequence[float]]
    audio_seconds: float
    wall_seconds: float
    waiting_seconds: float  # mean over the ranks
    steps: float = 0.0
    skipped_steps: float = 0.0  # steps whose gradient was not finite

    @property
    def means(self) -> dict[str, float]:
        """The mean of each name that was counted."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}

    @property
    def loss(self) -> float:
        return self.means.get(LOSS_NAME, float("nan"))

    @property
    def logged(self) -> dict[str, float]:
        return {name: mean for name, mean in self.means.items() if name != LOSS_NAME}

    @property
    def rtfx(self) -> float:
        """Seconds of audio per second."""
        return self.audio_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def data_wait_share(self) -> float:
        return self.waiting_seconds / self.wall_seconds if self.wall_seconds else 0.0

    def __add__(self, other: "MetricTotals") -> "MetricTotals":
        sums = dict(self.sums)
        for name, (total, count) in other.sums.items():
            own_total, own_count = sums.get(name, (0.0, 0.0))
            sums[name] = own_total + total, own_count + count
        names = [figure.name for figure in fields(self) if figure.name != "sums"]
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        return MetricTotals(sums=sums, **added)


NO_TOTALS = MetricTotals({}, 0.0, 0.0, 0.0)
SAVED_TOTALS, LOG_SIZE = ("since_logged", "of_epoch", "of_run"), "log_size"  # in checkpoints


class Meter:
    """Add sums without making the host wait for the device; the one wait is in `read`.

    sources: names of a mix of training sources; none without.
    """

    def __init__(self, device: torch.device, sources: Sequence[str] = ()) -> None:
        self.device = device
        self._sources = sources
        self.reset()

    def add(self, loss: Loss, audio_seconds: float, sources: Tensor | None = None) -> None:
        """Count one micro-batch of this rank.

        sources: the source of each utterance, (B,). A loss that is not by utterance is not counted
            for any source.
        """
        self.log(LOSS_NAME, loss.sums, loss.counts)
        if self._sources and sources is not None and sources.shape == loss.sums.shape:
            sources = sources.to(self.device, non_blocking=True)
            for index, name in enumerate(self._sources):
                is_of_source = sources == index
                sums = loss.sums.where(is_of_source, 0)
                self.log(f"{SOURCE_LOSS}{name}", sums, loss.counts * is_of_source)
        self._audio_seconds += audio_seconds

    def log(self, name: str, total: Amount, count: Amount) -> None:
        """Add to a name's sum and to its divisor, unless one of them is not finite."""
        amounts = []
        for amount in (total, count):
            if isinstance(amount, Tensor):
                amount = amount.detach().to(self.device, non_blocking=True)
                amounts.append(amount.sum(dtype=self._zero.dtype))
            else:
                amounts.append(torch.full_like(self._zero, amount))
        pair = torch.stack(amounts)  # (2,)
        pair = torch.where(pair.isfinite().all(), pair, 0.0)
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def timed(self, batches: Iterator[Batched]) -> Iterator[Batched]:
        """Yield the batches, and count the time spent waiting for them."""
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self._waiting_seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def read(self) -> MetricTotals:
        """Sum over ranks, transfer once, and start again.

        A rank may have logged other names, or in another order.
        """
        names = dict.fromkeys(chain.from_iterable(gather_over_ranks([*self._sums])))
        pairs = [self._sums.get(name, self._zero.expand(2)) for name in names]
        host = self._zero.new_tensor([self._audio_seconds, self._waiting_seconds])
        sums = sum_over_ranks(torch.cat([host, *pairs]))
        audio_seconds, waiting_seconds, *values = sums.tolist()
        reading = MetricTotals(
            sums=dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True)),
            audio_seconds=audio_seconds,
            wall_seconds=time.perf_counter() - self._started,
            waiting_seconds=waiting_seconds / world_size(),
            steps=self.steps,
            skipped_steps=self.skipped_steps,
        )
        self.reset()
        return reading

    def reset(self) -> None:
        self._zero = torch.zeros((), dtype=sum_dtype(self.device), device=self.device)
        self._sums: dict[str, Tensor] = {}  # (2,) by name: the sum and its divisor
        self._audio_seconds = 0.0
        self._waiting_seconds = 0.0
        self.steps, self.skipped_steps = 0.0, 0.0  # the same on every rank
        self._started = time.perf_counter()


class TrainingMetrics:
    """Add up the readings of a meter, which are taken at logged steps, checkpoints and validations.

    During a validation, the meter has what its batches log.

    Attributes:
        since_logged, of_epoch, of_run: the sums of the readings since the last logged step of the
            epoch, of the epoch, and of the run.
    """

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter(device)
        self.since_logged = self.of_epoch = self.of_run = NO_TOTALS
        self._log: RunLog | None = None  # open on the first rank only
        self._log_size = 0  # while it is closed
        self._has_warned, self._num_steps = False, 0.0
        self.progress = TrainingProgress(total_epochs=0, total_steps=0)

    def open(
        self,
        folder: Path | None,
        progress: TrainingProgress,
        *,
        step: int,
        sources: Sequence[str] = (),
    ) -> None:
        """Open the log at the step and size of the checkpoint that the run starts from."""
        with raise_on_all_ranks(OSError):
            if rank() == 0 and folder is not None:
                self._log = RunLog(folder, size=self.log_size, step=step)
        self.progress = progress
        self.meter = Meter(self.meter.device, sources)

    @property
    def log_size(self) -> int:
        """The bytes of the log up to here, on the first rank."""
        return self._log_size if self._log is None else self._log.size

    def close(self) -> None:
        self.progress.close()
        if self._log is not None:
            self._log.close()
            self._log_size, self._log = self._log.size, None

    def start_epoch(self, *, afresh: bool) -> None:
        if afresh:
            self.since_logged = self.of_epoch = NO_TOTALS
        self.meter.reset()

    def read(self) -> None:
        """Read the meter, and add the reading to the sums."""
        reading = self.meter.read()
        self.since_logged += reading
        self.of_epoch += reading
        self.of_run += reading
        self._num_steps += reading.steps
        self._warn_of_skips(self.since_logged)

    def add(self, losses: Mapping[str, Loss], audio_seconds: float, sources: Tensor | None) -> None:
        """Count a micro-batch of this rank: its first loss, and the others by their names."""
        for index, (name, loss) in enumerate(losses.items()):
            self.log_parts(loss)
            if index:
                self.log(name, loss.sums, loss.counts)
            else:
                self.meter.add(loss, audio_seconds, sources)

    def log_parts(self, loss: Loss) -> None:
        for name, (total, count) in loss.parts.items():
            self.log(name, total, count)

    def log(self, name: str, total: Amount, count: Amount) -> None:
        """Add to a figure of the recipe; raise ConfigError if its name belongs to another."""
        require_free_name(name, self.progress.metrics)
        self.meter.log(name, total, count)

    def log_gradients(
        self, norms: Mapping[str, Tensor], scaler: GradScaler, *, by_optimizer: bool
    ) -> None:
        """Add the gradient norms of a step, and the scale of a GradScaler.

        They are equal on all ranks, which share their count, so that steps of a start on another
        number of ranks weigh the same in the mean of an epoch.
        """
        self.meter.steps += 1
        share = 1 / world_size()
        for name, norm in norms.items():
            self.meter.log(
                f"{GRAD_NORM}/{name}" if by_optimizer else GRAD_NORM, norm * share, share
            )
        if scaler.is_enabled():  # its tensor; `get_scale` would wait for the device
            one = torch.ones((), device=self.meter.device)
            self.meter.log(GRAD_SCALE, scaler.scale(one) * share, share)

    def _warn_of_skips(self, reading: MetricTotals) -> None:
        """Say once that most gradients are not finite, after the steps that find the scale."""
        scale = reading.means.get(GRAD_SCALE, LOWEST_SCALE)
        skips_much = reading.skipped_steps > MAX_SKIPPED_SHARE * reading.steps
        is_judged = reading.steps >= MIN_JUDGED_STEPS and self._num_steps > STEPS_TO_FIND_SCALE
        problem = ""
        if scale < LOWEST_SCALE:
            problem = f"the gradient scale has fallen to {scale:.1e}"
        elif skips_much and is_judged:
            problem = f"{reading.skipped_steps:g} of the last {reading.steps:g} steps were skipped"
        if problem and not self._has_warned and rank() == 0:
            self._has_warned = True
            logger.warning(f"{problem}. Set `precision: bf16`, or lower `lr`.")

    def log_figure(self, name: str, step: int, figure: Any) -> None:
        if self._log is not None:
            self._log.write_figure(name, step, figure)

    def log_step(self, epoch: int, step: int, *, rate: float, live: bool) -> None:
        """Log the figures of the last steps; ``live`` also shows them. Every rank calls this."""
        reading, self.since_logged = self.since_logged, NO_TOTALS
        figures = StepFigures(
            epoch=epoch,
            step=step,
            loss=reading.loss,
            learning_rate=rate,
            rtfx=reading.rtfx,
            data_wait_share=reading.data_wait_share,
            skipped_steps=int(reading.skipped_steps),
            logged=reading.logged,
        )
        self._write(figures)
        if live:
            self.progress.report_step(figures)

    def log_epoch(
        self, epoch: int, step: int, *, valid_loss: float, values: Mapping[str, float]
    ) -> EpochFigures:
        """Log and return the figures of a validation and the epoch so far; every rank calls it."""
        totals = self.of_epoch
        of_validation = {f"{VALID}{n}": mean for n, mean in self.meter.read().logged.items()}
        figures = EpochFigures(
            epoch=epoch,
            step=step,
            loss=totals.loss,
            rtfx=totals.rtfx,
            skipped_steps=int(totals.skipped_steps),
            valid_loss=valid_loss,
            metrics=values,
            logged={**totals.logged, **of_validation},
        )
        self._write(figures)
        return figures

    def _write(self, figures: LoggedFigures) -> None:
        with raise_on_all_ranks(OSError):
            if self._log is not None:
                self._log.write(figures)

    # ---- with the run's checkpoints

    def state(self) -> dict[str, Any]:
        totals = {name: vars(getattr(self, name)) for name in SAVED_TOTALS}
        return {**totals, LOG_SIZE: self.log_size}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; it is missing in SpeechBrain's checkpoints."""
        for name in SAVED_TOTALS:
            setattr(self, name, MetricTotals(**state.get(name, vars(NO_TOTALS))))
        self._log_size = state.get(LOG_SIZE, 0)
