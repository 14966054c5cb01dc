"""When a run saves and ends: on a signal, by the clock, early, or after its last epoch.

All ranks decide the same. A run obeys a signal between two steps.
"""

import math
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from sbkit.base.errors import (
    BAD_INPUT,
    FAILED,
    LASTING_FAULTS,
    OtherRankError,
    StopRequestedError,
)
from sbkit.base.files import read_file, write_text_atomically
from sbkit.base.process import (
    LOST_RANK,
    STOP_SIGNALS,
    as_user_error,
    exit_code,
    handle_signals,
    report_error,
)
from sbkit.base.stores import store_patience, wait_for_store
from sbkit.checkpoint.folder import newest_checkpoint
from sbkit.checkpoint.run_config import CHECKPOINTS, LIMIT_PATH
from sbkit.config.keys import with_defaults
from sbkit.distributed.ranks import gather_over_ranks, world_size

SECONDS_BETWEEN_QUESTIONS = 1.0  # of training, between two questions to all ranks
MAX_STEPS_BETWEEN_QUESTIONS = 25  # later steps may be slower
STALE_VALIDATIONS = "stale_validations"  # keys of a checkpoint's meta file
FIT_SECONDS = "fit_seconds"
LAST_FAILURE = "last_failure.txt"  # in the folder of a run that may start again


class StopSignals:
    """Record SIGTERM, SIGUSR1, SIGHUP and Ctrl-C without interrupting a step.

    A second Ctrl-C interrupts at once. Outside the main thread nothing is received. An exception
    that leaves the block clears the request, so that the next call resumes.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handling = ExitStack()

    def __enter__(self) -> "StopSignals":
        self._handling.enter_context(handle_signals((*STOP_SIGNALS, signal.SIGINT), self._receive))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._handling.close()
        if kind is not None:
            self.received = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_second = self.received is signal.SIGINT and number == signal.SIGINT
        self.received = signal.Signals(number)
        if is_second:
            raise KeyboardInterrupt("Interrupted at once: the present step is not saved.")


class TimeLimit:
    """The share of `max_minutes` that a run has spent on training and validation.

    The clock is rank 0's. Between two questions to all ranks the share stays the same, so that all
    ranks have the same learning rate and end after the same step.

    Attributes:
        spent: seconds of earlier starts, which a checkpoint has.
        share: at the last question; 0 without a limit.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_seconds = 60 * minutes
        self.spent, self.share = 0.0, 0.0
        self._clock = clock
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training and validation so far, by this rank's clock."""
        return self.spent + (0.0 if self._started is None else self._clock() - self._started)

    @property
    def is_over(self) -> bool:
        """Whether all ranks know that the time is over."""
        return self.share >= 1

    def measure(self) -> float:
        """Return the share by this rank's clock."""
        return self.seconds / self.max_seconds if self.max_seconds else 0.0

    def start(self) -> None:
        self._started = self._clock()

    def stop(self) -> None:
        self.spent, self._started = self.seconds, None

    def agree(self) -> None:
        """Take rank 0's share, at the start or after a validation; every rank calls this."""
        self.share = gather_over_ranks(self.measure())[0]


class EpochSaver:
    """Save within an epoch when it is time, and stop after a signal to any rank.

    Asking in every step would make ranks wait for one another. They ask about once a second, after
    as many steps as the slowest rank takes in that time.
    """

    def __init__(
        self,
        save: Callable[[], None] | None,
        *,
        minutes: float,
        steps: int,
        max_steps: int | None,
        time_limit: TimeLimit,
    ) -> None:
        """Count from now on.

        save: writes a checkpoint within an epoch; None for a run without a checkpointer.
        minutes, steps: between two such checkpoints, as optimizer steps; 0 or less for never.
        max_steps: optimizer steps of the run.
        """
        self.signals = StopSignals()
        self.time_limit = time_limit
        self._save = save
        self._minutes = minutes
        self._steps = steps
        self._max_steps = math.inf if max_steps is None else max_steps
        self._last_save = time.monotonic()
        self._unsaved_steps = 0
        self._num_steps, self._next_question = 0, 0
        self._last_question = (0, -math.inf)  # its step and time

    def is_over(self, step: int) -> bool:
        """Return whether the run ends, perhaps within an epoch, which is then validated."""
        return self.time_limit.is_over or step >= self._max_steps

    def after_micro_batch(self, step: int, *, ends_step: bool, is_last: bool) -> None:
        """Save or leave if it is time, but not within a step.

        At the end of an epoch it only leaves: the epoch is saved before its validation, and after.

        step: optimizer steps so far, for the log.
        ends_step, is_last: whether the micro-batch was the last of its step, and of its epoch.
        """
        if not ends_step:
            return
        self._unsaved_steps += 1
        is_due = self._minutes > 0 and time.monotonic() - self._last_save > 60 * self._minutes
        stops, saves, self.time_limit.share = self._ask_ranks(saves=is_due, at_once=is_last)
        saves = saves or 0 < self._steps <= self._unsaved_steps
        if is_last:
            self._unsaved_steps, saves = 0, False
        if stops or saves:
            self.save()
        if stops:
            self.leave(step)

    def _ask_ranks(self, *, saves: bool, at_once: bool) -> tuple[bool, bool, float]:
        """Return whether any rank stops, whether any saves, and rank 0's share of the time.

        The share stays the same if the ranks are not asked. All call this after every step.

        at_once: ask now; equal on all ranks.
        """
        self._num_steps += 1
        answer = (self.signals.received is not None, saves, self.time_limit.measure())
        if world_size() == 1:
            return answer
        if self._num_steps < self._next_question and not at_once:
            return False, False, self.time_limit.share
        last_step, asked_at = self._last_question
        now = time.monotonic()
        self._last_question = (self._num_steps, now)
        pace = (now - asked_at) / (self._num_steps - last_step)  # seconds; infinite at first
        ranks_stop, ranks_save, shares, paces = zip(
            *gather_over_ranks((*answer, pace)), strict=True
        )
        steps = int(SECONDS_BETWEEN_QUESTIONS / max(*paces, 1e-3))
        self._next_question = self._num_steps + min(MAX_STEPS_BETWEEN_QUESTIONS, max(1, steps))
        return any(ranks_stop), any(ranks_save), shares[0]

    def save(self) -> None:
        self._last_save = time.monotonic()
        self._unsaved_steps = 0
        if self._save is not None:
            self._save()

    def leave(self, step: int) -> NoReturn:
        """Raise StopRequestedError, saying whether there is a checkpoint of the step."""
        if self._save is None:
            raise StopRequestedError(
                f"Stopped at step {step}; there is no checkpointer to save it. The next `fit` of "
                "this Brain trains on."
            )
        raise StopRequestedError(
            f"Stopped at step {step}; checkpoint saved. The same command or call resumes."
        )


def train_restartably(
    train: Callable[[], None],
    folder: Path,
    *,
    patience: float,
    position: Callable[[], tuple[int, int]],
) -> int:
    """Train, print an error, and return the exit code: FAILED if a launcher is to start it again.

    A run that has not taken a step is not started again, nor one with a fault of data or code, nor
    one that failed at this step before: LAST_FAILURE says so.

    patience: for stores that are away, until training starts. A new run has none, and tells its
        user at once.
    position: returns the epoch and the step; zeros until the last checkpoint is loaded.
    """
    file, last = folder / LAST_FAILURE, ""
    with store_patience(patience), suppress(OSError):  # it is missing, most of the time
        last = wait_for_store(lambda: read_file(file)).decode()
    has_begun = last != "" or newest_checkpoint(folder / CHECKPOINTS) is not None
    try:
        with store_patience(patience if has_begun else 0):
            train()
    except Exception as error:
        code, earlier = exit_code(error), ""
        is_lost_rank = isinstance(error, dist.DistError) or re.search(LOST_RANK, str(error))
        if code == FAILED and not is_lost_rank:
            epoch, step = position()
            place = f"In epoch {epoch}, after step {step}: "
            if last.startswith(place):
                earlier = f"\nThe run failed here before, so it is not started again. {last}"
            if earlier or isinstance(error, LASTING_FAULTS) or not (has_begun or step):
                code = BAD_INPUT
            elif not isinstance(error, OtherRankError):  # that rank writes it
                with suppress(OSError):  # the disk of the run is away
                    write_text_atomically(file, f"{place}{as_user_error(error) or repr(error)}")
        if not isinstance(error, OtherRankError):
            report_error(error, earlier)
        return code
    with suppress(OSError):  # it is missing, most of the time, or its disk is away
        file.unlink()
    return 0


def find_ends(
    run_folder: Path, settings: Mapping[str, Any], max_epochs: int | None
) -> dict[str, float]:
    """Return what has ended a run: its last epoch, step or minute, or early stopping.

    max_epochs: the last epoch of the run, if it has one.
    Returns keys, and the values that they must exceed for the run to train on.
    """
    newest = newest_checkpoint(run_folder / CHECKPOINTS)
    ends: dict[str, float] = {}
    if newest is None:
        return ends
    meta, settings = newest.meta, with_defaults(settings)
    # A checkpoint that was saved without a validation does not have it.
    if 0 < settings["early_stopping"] <= meta.get(STALE_VALIDATIONS, 0):
        ends["early_stopping"] = meta[STALE_VALIDATIONS]
    limit = settings["optimizer_step_limit"] or 0
    if 0 < limit <= meta.get("optimizer_step", 0):
        ends["optimizer_step_limit"] = meta["optimizer_step"]
    if meta.get("end-of-epoch", True):
        if max_epochs is not None and meta.get("epoch", 0) >= max_epochs:
            ends[LIMIT_PATH] = meta["epoch"]
        if 0 < 60 * settings["max_minutes"] <= meta.get(FIT_SECONDS, 0):
            ends["max_minutes"] = math.ceil(meta[FIT_SECONDS] / 60 * 100) / 100
    return ends
