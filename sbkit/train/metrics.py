"""The loss and speed of a run: added up, saved in checkpoints, logged and shown."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sbkit.audio.lengths import widest_float
from sbkit.distributed.ranks import leave_together, rank, sum_over_ranks, world_size
from sbkit.logs.progress import TrainingProgress
from sbkit.logs.run_log import EpochFigures, Figures, RunLog, StepFigures
from sbkit.models.loss import Loss

Batched = TypeVar("Batched")
NUM_TOTALS = 2  # the sum of the losses, and the labels


@dataclass(frozen=True)
class MetricTotals:
    """Sums over all ranks since a meter was last read.

    source_sums: the sum of the losses of each training source in a mix, then their labels.
    """

    loss_sum: float
    labels: float
    audio_seconds: float
    wall_seconds: float
    waiting_seconds: float  # mean over the ranks
    skipped_steps: float = 0.0  # steps whose gradient was not finite
    source_sums: Sequence[float] = ()

    @property
    def loss(self) -> float:
        return self.loss_sum / self.labels if self.labels else float("nan")

    @property
    def rtfx(self) -> float:
        """Seconds of audio per second."""
        return self.audio_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def data_wait_share(self) -> float:
        return self.waiting_seconds / self.wall_seconds if self.wall_seconds else 0.0

    def source_losses(self, names: Sequence[str]) -> dict[str, float]:
        """Return the mean loss per label of each source, without sources that had no label."""
        sums = self.source_sums[: len(names)]
        labels = self.source_sums[len(names) :]
        rows = zip(names, sums, labels, strict=False)  # nothing was read if there are no sums
        return {name: loss_sum / count for name, loss_sum, count in rows if count}

    def __add__(self, other: "MetricTotals") -> "MetricTotals":
        pairs = zip_longest(self.source_sums, other.source_sums, fillvalue=0.0)
        names = [figure.name for figure in fields(self) if figure.name != "source_sums"]
        return MetricTotals(
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            source_sums=tuple(a + b for a, b in pairs),
        )


NO_TOTALS = MetricTotals(0.0, 0.0, 0.0, 0.0, 0.0)


class Meter:
    """Add losses without making the host wait for the device; the one wait is in `read`.

    num_sources: of a mix of training sources; 0 without.
    """

    def __init__(self, device: torch.device, num_sources: int = 0) -> None:
        self.device = device
        self._sources = torch.arange(num_sources, device=device).unsqueeze(1)  # (sources, 1)
        self._reset()

    def add(self, loss: Loss, audio_seconds: float, sources: Tensor | None = None) -> None:
        """Count one micro-batch of this rank; a loss that is not finite is left out of the mean.

        sources: the source of each utterance, (B,). A loss that is not by utterance is not counted
            for any source.
        """
        sums = loss.sums.detach()
        is_finite = sums.sum().isfinite()
        totals = torch.stack([sums.sum(), loss.counts.sum()]).to(self._loss)
        self._loss[:NUM_TOTALS] += torch.where(is_finite, totals, 0.0)
        if len(self._sources) and sources is not None and sources.shape == sums.shape:
            is_of_source = self._sources == sources.to(self.device, non_blocking=True)
            per_utterance = torch.stack([sums, loss.counts]).to(self._loss)  # (2, B)
            by_source = per_utterance @ is_of_source.T.to(self._loss)  # (2, sources)
            self._loss[NUM_TOTALS:] += torch.where(is_finite, by_source.flatten(), 0.0)
        self._audio_seconds += audio_seconds

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
        reading = self.peek()
        self._reset()
        return reading

    def resume(self, unread: MetricTotals) -> None:
        """Continue from the sums of a stopped run; rank 0 adds them for all ranks."""
        self._started -= unread.wall_seconds
        if rank() == 0:
            self._loss[:NUM_TOTALS] += self._loss.new_tensor([unread.loss_sum, unread.labels])
            if unread.source_sums:
                self._loss[NUM_TOTALS:] += self._loss.new_tensor(unread.source_sums)
            self._audio_seconds += unread.audio_seconds
            self._waiting_seconds += unread.waiting_seconds * world_size()
        self.skipped_steps += unread.skipped_steps

    def peek(self) -> MetricTotals:
        """Sum over ranks, transfer once, and leave the meter as it is."""
        host = self._loss.new_tensor([self._audio_seconds, self._waiting_seconds])
        sums = sum_over_ranks(torch.cat([host, self._loss]))
        audio_seconds, waiting_seconds, loss_sum, labels, *source_sums = sums.tolist()
        return MetricTotals(
            loss_sum=loss_sum,
            labels=labels,
            audio_seconds=audio_seconds,
            wall_seconds=time.perf_counter() - self._started,
            waiting_seconds=waiting_seconds / world_size(),
            skipped_steps=self.skipped_steps,
            source_sums=source_sums,
        )

    def _reset(self) -> None:
        dtype = widest_float(self.device)
        # NUM_TOTALS of all sources, then the losses and the labels by source
        size = NUM_TOTALS + 2 * len(self._sources)
        self._loss: Tensor = torch.zeros(size, dtype=dtype, device=self.device)
        self._audio_seconds = 0.0
        self._waiting_seconds = 0.0
        self.skipped_steps = 0.0  # the same on every rank
        self._started = time.perf_counter()


class TrainingMetrics:
    """Add up the readings of a meter over an epoch and over the run.

    Attributes:
        so_far: the sum of this epoch's readings.
        unread: the contents of the meter when the run was saved within an epoch.
        train_seconds, audio_seconds: sums of the whole run.
        sources: names of the training sources of a mix; none without.
    """

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter(device)
        self.sources: Sequence[str] = ()
        self.so_far = NO_TOTALS
        self.train_seconds, self.audio_seconds = 0.0, 0.0
        self.unread = NO_TOTALS
        self._log: RunLog | None = None  # of the first rank
        self.progress = TrainingProgress(total_epochs=0, total_steps=0)

    def open(
        self,
        folder: Path | None,
        progress: TrainingProgress,
        *,
        resume_step: int,
        before_validation: bool,
        sources: Sequence[str] = (),
    ) -> None:
        """Open the log, without the entries after the checkpoint that the run starts from.

        before_validation: whether the checkpoint comes before the validation of its epoch.
        """
        with failing_together(OSError):
            if rank() == 0 and folder is not None:
                self._log = RunLog(
                    folder,
                    resume_step=resume_step,
                    before_validation=before_validation,
                    keep_test=True,
                )
        self.progress = progress
        self.sources = sources
        self.meter = Meter(self.meter.device, len(sources))

    def close(self) -> None:
        self.progress.close()
        if self._log is not None:
            self._log.close()

    def start_epoch(self, *, afresh: bool) -> None:
        if afresh:
            self.so_far = NO_TOTALS
        self.meter.read()
        self.meter.resume(self.unread)
        self.unread = NO_TOTALS
        self.progress.resume()

    def read(self) -> MetricTotals:
        """Read the meter, and add the reading to the sums."""
        reading = self.meter.read()
        self.so_far += reading
        self.train_seconds += reading.wall_seconds
        self.audio_seconds += reading.audio_seconds
        return reading

    def log_step(
        self, epoch: int, step: int, reading: MetricTotals, *, rate: float, live: bool
    ) -> None:
        """Log the figures of the last steps; ``live`` also shows them. Every rank calls this."""
        figures = StepFigures(
            epoch=epoch,
            step=step,
            loss=reading.loss,
            learning_rate=rate,
            rtfx=reading.rtfx,
            data_wait_share=reading.data_wait_share,
            skipped_steps=int(reading.skipped_steps),
            source_losses=reading.source_losses(self.sources),
        )
        self._write(figures)
        if live:
            self.progress.report_step(figures)

    def log_epoch(
        self, epoch: int, step: int, *, valid_loss: float, values: Mapping[str, float]
    ) -> EpochFigures:
        """Log and return the figures of a validation and the epoch so far; every rank calls it."""
        totals = self.so_far + self.unread
        figures = EpochFigures(
            epoch=epoch,
            step=step,
            loss=totals.loss,
            rtfx=totals.rtfx,
            skipped_steps=int(totals.skipped_steps),
            valid_loss=valid_loss,
            metrics=values,
            source_losses=totals.source_losses(self.sources),
        )
        self._write(figures)
        return figures

    def _write(self, figures: Figures) -> None:
        with failing_together(OSError):
            if self._log is not None:
                self._log.write(figures)

    # -- with the run's checkpoints -----------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "so_far": vars(self.so_far),
            "unread": vars(self.unread),
            "train_seconds": self.train_seconds,
            "audio_seconds": self.audio_seconds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; it is missing in SpeechBrain's checkpoints."""
        self.so_far = MetricTotals(**state.get("so_far", vars(NO_TOTALS)))
        self.unread = MetricTotals(**state.get("unread", vars(NO_TOTALS)))
        self.train_seconds = state.get("train_seconds", 0.0)
        self.audio_seconds = state.get("audio_seconds", 0.0)


@contextmanager
def failing_together(errors: type[Exception]) -> Iterator[None]:
    """Stop all ranks if one raises such an error; that rank reports it."""
    raised: Exception | None = None
    try:
        yield
    except errors as error:
        raised = error
    leave_together(raised)
