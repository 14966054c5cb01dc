"""Between two steps: save where it is time, and leave where any rank was asked to."""

import time
from typing import NoReturn

from sbkit.base.errors import ASKED_TO_STOP
from sbkit.logs.log import say
from sbkit.train.stopping import Decision, RankConsensus, StopSignals


class SaveOrLeave:
    """Decide after every step, the same on all ranks.

    minutes, steps: between two checkpoints within an epoch; 0 or less is never.
    """

    def __init__(self, *, minutes: float, steps: int) -> None:
        self.signals = StopSignals()
        self._consensus = RankConsensus()
        self._minutes, self._steps = minutes, steps
        self._last_save = time.monotonic()

    def decide(self, step: int, *, is_last: bool) -> Decision:
        """Decide after step number ``step``; the last one of an epoch is saved with the epoch."""
        is_due = self._minutes > 0 and time.monotonic() - self._last_save > 60 * self._minutes
        agreed = self._consensus.ask(
            stop=self.signals.heard is not None, save=is_due, at_once=is_last
        )
        by_step = self._steps > 0 and step % self._steps == 0
        save = agreed.stop or ((by_step or agreed.save) and not is_last)
        return Decision(stop=agreed.stop, save=save)

    def note_save(self) -> None:
        """Begin to count the minutes anew."""
        self._last_save = time.monotonic()


def leave(step: int, *, is_saved: bool) -> NoReturn:
    """End the process as one that was asked to.

    Raises:
        SystemExit: always.
    """
    what = "It is saved; the same command goes on." if is_saved else "Nothing saves."
    say(f"Asked to stop after step {step}. {what}")
    raise SystemExit(ASKED_TO_STOP)
