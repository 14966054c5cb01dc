"""Between two steps: save where it is time, and leave where any rank was asked to."""

import logging
import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import NoReturn

from sbkit.base.errors import ASKED_TO_STOP
from sbkit.base.process import detach_from_lost_terminal, handle_signals
from sbkit.distributed.ranks import gather_over_ranks, world_size

logger = logging.getLogger(__name__)

ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
AGREE_EVERY = 1.0  # seconds of training between two questions to all ranks
MOST_STEPS = 25  # between them: the steps to come may be slower than those before


class StopSignals:
    """Note SIGTERM, SIGUSR1, SIGHUP and Ctrl-C without interrupting a step.

    A second Ctrl-C interrupts at once. Outside the main thread nothing is received.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handling = ExitStack()

    def __enter__(self) -> "StopSignals":
        self._handling.enter_context(handle_signals(ASKED, self._receive))
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = self.received is signal.SIGINT and number == signal.SIGINT
        self.received = signal.Signals(number)
        if self.received is signal.SIGHUP:
            detach_from_lost_terminal()
        if again:
            raise KeyboardInterrupt


class RankConsensus:
    """Make ranks agree between two steps on what any of them asks for.

    Asking in every step would make ranks wait for one another; they ask about every second of
    training, after a number of steps that the slowest of them decides for all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps, self._next = 0, 0
        self._since = (0, -math.inf)  # the last question: step and time

    def ask(self, *, stop: bool, save: bool, at_once: bool = False) -> tuple[bool, bool]:
        """Agree after a step whether to stop and to save; every rank calls this after every step.

        at_once: whatever the time, for all ranks alike.
        """
        self._steps += 1
        if world_size() == 1:
            return stop, save
        if self._steps < self._next and not at_once:
            return False, False
        step, started = self._since
        self._since = (self._steps, self._clock())
        pace = (self._since[1] - started) / (self._steps - step)  # seconds; infinite at first
        stops, saves, paces = zip(*gather_over_ranks((stop, save, pace)), strict=True)
        self._next = self._steps + min(MOST_STEPS, max(1, int(AGREE_EVERY / max(*paces, 1e-3))))
        return any(stops), any(saves)


class SaveOrLeave:
    """Decide after every step, the same on all ranks.

    save: writes a checkpoint within an epoch; None where the run has no checkpointer.
    minutes, steps: between two such checkpoints; 0 or less is never.
    """

    def __init__(self, save: Callable[[], None] | None, *, minutes: float, steps: int) -> None:
        self.signals = StopSignals()
        self._consensus = RankConsensus()
        self._save = save
        self._minutes, self._steps = minutes, steps
        self._last_save, self._steps_since = time.monotonic(), 0

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Save or leave after step number ``step``; the last of an epoch is saved with the epoch.

        Raises SystemExit: any rank was asked to stop.
        """
        is_due = self._minutes > 0 and time.monotonic() - self._last_save > 60 * self._minutes
        is_asked = self.signals.received is not None
        stops, saves = self._consensus.ask(stop=is_asked, save=is_due, at_once=is_last)
        # Not `step`, which stands still where a recipe steps its optimizer itself.
        self._steps_since = 0 if is_last else self._steps_since + 1
        by_step = 0 < self._steps <= self._steps_since
        if stops or ((by_step or saves) and not is_last):
            self.save()
        if stops:
            self.leave(step)

    def save(self) -> None:
        """Save, and begin to count the minutes anew."""
        self._last_save, self._steps_since = time.monotonic(), 0
        if self._save is not None:
            self._save()

    def leave(self, step: int) -> NoReturn:
        """End the process, by SystemExit, as one that was asked to."""
        saves = self._save is not None
        what = "It is saved; the same command goes on." if saves else "Nothing is saved."
        logger.info(f"Asked to stop after step {step}. {what}")
        raise SystemExit(ASKED_TO_STOP)
