"""Between two steps: save where it is time, and leave where any rank was asked to."""

import time
from collections.abc import Callable
from typing import NoReturn

from sbkit.base.errors import ASKED_TO_STOP
from sbkit.logs.log import say
from sbkit.train.stopping import Decision, RankConsensus, StopSignals


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
        self._last_save = time.monotonic()

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Save or leave after step number ``step``; the last of an epoch is saved with the epoch.

        Raises SystemExit: any rank was asked to stop.
        """
        decision = self.decide(step, is_last=is_last)
        if decision.save:
            self.save()
        if decision.stop:
            self.leave(step)

    def decide(self, step: int, *, is_last: bool) -> Decision:
        """Agree with all ranks on what to do after a step."""
        is_due = self._minutes > 0 and time.monotonic() - self._last_save > 60 * self._minutes
        agreed = self._consensus.ask(
            stop=self.signals.heard is not None, save=is_due, at_once=is_last
        )
        by_step = self._steps > 0 and step % self._steps == 0
        save = agreed.stop or ((by_step or agreed.save) and not is_last)
        return Decision(stop=agreed.stop, save=save)

    def save(self) -> None:
        """Save, and begin to count the minutes anew."""
        self._last_save = time.monotonic()
        if self._save is not None:
            self._save()

    def leave(self, step: int) -> NoReturn:
        """End the process as one that was asked to.

        Raises SystemExit: always.
        """
        saves = self._save is not None
        what = "It is saved; the same command goes on." if saves else "Nothing is saved."
        say(f"Asked to stop after step {step}. {what}")
        raise SystemExit(ASKED_TO_STOP)
