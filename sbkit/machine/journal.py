"""What a run has lost and how long it took: added up, saved with it, logged and shown."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sbkit.machine.meter import NOTHING, Meter, Reading
from sbkit.tensors.distributed import rank
from sbkit.tensors.log import EpochFigures, QuietLog, RunLog, StepFigures
from sbkit.tensors.progress import Progress


class Journal:
    """Add up the readings of a meter over an epoch and over the run.

    Attributes:
        meter: counts on the device.
        so_far: readings of this epoch.
        train_seconds, audio_seconds: of the whole run.
    """

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter(device)
        self.so_far = NOTHING
        self.train_seconds, self.audio_seconds = 0.0, 0.0
        self._unread = NOTHING  # what the meter held when the run was saved
        self._log, self._progress = QuietLog(), Progress(total_epochs=0, total_steps=0)

    def open(
        self, folder: Path | None, *, resume_step: int, total_epochs: int, total_steps: int
    ) -> None:
        """Open the log where the run stands: behind the checkpoint that it starts from."""
        if rank() == 0 and folder is not None:
            self._log = RunLog(folder, resume_step=resume_step)
        self._progress = Progress(total_epochs=total_epochs, total_steps=total_steps)

    def close(self) -> None:
        """Finish the log, and give the terminal back."""
        self._progress.close()
        self._log.close()

    def start_epoch(self, *, afresh: bool) -> None:
        """Start an epoch, or go on within one; what passed before is none of it."""
        if afresh:
            self.so_far = NOTHING
        self.meter.read()
        self.meter.go_on(self._unread)
        self._unread = NOTHING

    def read(self) -> Reading:
        """Read the meter and add it up."""
        reading = self.meter.read()
        self.so_far += reading
        self.train_seconds += reading.wall_seconds
        self.audio_seconds += reading.audio_seconds
        return reading

    def log_step(self, epoch: int, step: int, reading: Reading, *, rate: float, live: bool) -> None:
        """Write the figures of the last steps; ``live`` shows them, too."""
        figures = StepFigures(
            epoch=epoch,
            step=step,
            loss=reading.loss,
            learning_rate=rate,
            xrt=reading.xrt,
            waiting=reading.waiting,
            skipped=int(reading.skipped),
        )
        self._log.write(figures)
        if live:
            self._progress.step(figures)

    def log_epoch(self, epoch: int, step: int, *, dev_loss: float, cer: float, wer: float) -> None:
        """Write an epoch's figures to the log and the screen."""
        figures = EpochFigures(
            epoch=epoch,
            step=step,
            loss=self.so_far.loss,
            xrt=self.so_far.xrt,
            skipped=int(self.so_far.skipped),
            dev_loss=dev_loss,
            cer=cer,
            wer=wer,
        )
        self._log.write(figures)
        self._progress.epoch(figures)

    # -- with the run's checkpoints -----------------------------------------------------------

    @contextmanager
    def unread_kept(self) -> Iterator[None]:
        """Let a checkpoint within an epoch hold what the meter has not been read for."""
        self._unread = self.meter.peek()
        yield
        self._unread = NOTHING

    def state(self) -> dict[str, Any]:
        """Give all of it as plain data."""
        return {
            "so_far": vars(self.so_far),
            "unread": vars(self._unread),
            "train_seconds": self.train_seconds,
            "audio_seconds": self.audio_seconds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave; SpeechBrain's checkpoints have none of it."""
        self.so_far = Reading(**state.get("so_far", vars(NOTHING)))
        self._unread = Reading(**state.get("unread", vars(NOTHING)))
        self.train_seconds = state.get("train_seconds", 0.0)
        self.audio_seconds = state.get("audio_seconds", 0.0)
