"""The loss and the speed of a run: added up, saved with it, logged and shown."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sbkit.base.errors import BAD_INPUT
from sbkit.distributed.ranks import gather_over_ranks, rank
from sbkit.logs.log import EpochFigures, Figures, QuietLog, RunLog, StepFigures
from sbkit.logs.metric import Metrics
from sbkit.logs.progress import Progress
from sbkit.train.meter import ZERO, Meter, MetricTotals


class TrainingMetrics:
    """Add up the readings of a meter over an epoch and over the run.

    Attributes:
        meter: counts on the device.
        so_far: readings of this epoch.
        train_seconds, audio_seconds: of the whole run.
    """

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter(device)
        self.so_far = ZERO
        self.train_seconds, self.audio_seconds = 0.0, 0.0
        self._unread = ZERO  # what the meter held when the run was saved
        self._log, self._progress = QuietLog(), Progress(total_epochs=0, total_steps=0)

    def open(
        self,
        folder: Path | None,
        *,
        resume_step: int,
        total_epochs: int,
        total_steps: int,
        metrics: Metrics | None = None,
        within_epoch: bool = False,
    ) -> None:
        """Open the log where the run stands: behind the checkpoint that it starts from.

        within_epoch: that checkpoint is from before the validation of its epoch.
        """
        with _together():
            if rank() == 0 and folder is not None:
                self._log = RunLog(
                    folder, resume_step=resume_step, within_epoch=within_epoch, keep_test=True
                )
        self._progress = Progress(
            total_epochs=total_epochs, total_steps=total_steps, metrics=metrics
        )

    def close(self) -> None:
        """Close the log and the progress bar."""
        self._progress.close()
        self._log.close()

    def start_epoch(self, *, afresh: bool) -> None:
        """Start an epoch, or go on within one; what was counted before does not belong to it."""
        if afresh:
            self.so_far = ZERO
        self.meter.read()
        self.meter.resume(self._unread)
        self._unread = ZERO

    def read(self) -> MetricTotals:
        """Read the meter and add it up."""
        reading = self.meter.read()
        self.so_far += reading
        self.train_seconds += reading.wall_seconds
        self.audio_seconds += reading.audio_seconds
        return reading

    def log_step(
        self, epoch: int, step: int, reading: MetricTotals, *, rate: float, live: bool
    ) -> None:
        """Write the figures of the last steps; ``live`` shows them, too. Every rank calls it."""
        figures = StepFigures(
            epoch=epoch,
            step=step,
            loss=reading.loss,
            learning_rate=rate,
            rtfx=reading.rtfx,
            waiting=reading.waiting,
            skipped=int(reading.skipped),
        )
        self._write(figures)
        if live:
            self._progress.step(figures)

    def log_epoch(
        self, epoch: int, step: int, *, valid_loss: float, values: Mapping[str, float]
    ) -> None:
        """Write an epoch's figures to the log and the screen; every rank calls it."""
        figures = EpochFigures(
            epoch=epoch,
            step=step,
            loss=self.so_far.loss,
            rtfx=self.so_far.rtfx,
            skipped=int(self.so_far.skipped),
            valid_loss=valid_loss,
            metrics=values,
        )
        self._write(figures)
        self._progress.epoch(figures)

    def _write(self, figures: Figures) -> None:
        with _together():
            self._log.write(figures)

    # -- with the run's checkpoints -----------------------------------------------------------

    @contextmanager
    def unread_kept(self) -> Iterator[None]:
        """Include in a checkpoint within an epoch what the meter holds unread."""
        self._unread = self.meter.peek()
        yield
        self._unread = ZERO

    def state(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "so_far": vars(self.so_far),
            "unread": vars(self._unread),
            "train_seconds": self.train_seconds,
            "audio_seconds": self.audio_seconds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; SpeechBrain's checkpoints have none of it."""
        self.so_far = MetricTotals(**state.get("so_far", vars(ZERO)))
        self._unread = MetricTotals(**state.get("unread", vars(ZERO)))
        self.train_seconds = state.get("train_seconds", 0.0)
        self.audio_seconds = state.get("audio_seconds", 0.0)


@contextmanager
def _together() -> Iterator[None]:
    """Stop all ranks when the log of one cannot be written; that one reports it."""
    trouble: OSError | None = None
    try:
        yield
    except OSError as error:
        trouble = error
    if any(gather_over_ranks(trouble is not None)):
        raise trouble or SystemExit(BAD_INPUT)
