"""Signals that ask a run to save and leave, and how its ranks come to the same answer."""

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from sbkit.base.exit import leave_terminal, wanted
from sbkit.distributed.ranks import gather_over_ranks, world_size

ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
AGREE_EVERY = 1.0  # seconds of training between two questions to all ranks
MOST_STEPS = 25  # between them: the steps to come may be slower than those before


class StopSignals:
    """Note SIGTERM, SIGUSR1, SIGHUP and Ctrl-C without interrupting a step.

    A second Ctrl-C interrupts at once. Outside the main thread, where Python has no signals, it
    hears nothing.
    """

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        """Listen."""
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._hear) for each in wanted(ASKED)}
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the signals to those who had them before."""
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        again = self.heard is signal.SIGINT and number == signal.SIGINT
        self.heard = signal.Signals(number)
        if self.heard is signal.SIGHUP:
            leave_terminal()
        if again:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Decision:
    """What the ranks do between two steps, all of them the same."""

    stop: bool
    save: bool


NEITHER = Decision(stop=False, save=False)


class RankConsensus:
    """Make ranks agree between two steps on what any of them asks for.

    Asking in every step would make ranks wait for one another; they ask about every second of
    training, after a number of steps that the slowest of them decides for all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps, self._next = 0, 0
        self._since: tuple[int, float] | None = None  # the last question: step and time

    def ask(self, *, stop: bool, save: bool, at_once: bool = False) -> Decision:
        """Agree after a step; every rank calls this after every step.

        at_once: whatever the time, for all ranks alike.
        """
        self._steps += 1
        if world_size() == 1:
            return Decision(stop, save)
        if self._steps < self._next and not at_once:
            return NEITHER
        answers = gather_over_ranks((stop, save, self._pace()))
        stops, saves, paces = zip(*answers, strict=True)
        self._since = (self._steps, self._clock())
        self._next = self._steps + min(MOST_STEPS, max(1, int(AGREE_EVERY / max(*paces, 1e-3))))
        return Decision(any(stops), any(saves))

    def _pace(self) -> float:
        """Return the seconds of a step since the last question; infinite before the first."""
        if self._since is None:
            return math.inf
        before, started = self._since
        return (self._clock() - started) / (self._steps - before)
