"""Progress of a training run: a live line on a terminal, and a line for each epoch."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sbkit.logs.log import EpochFigures, StepFigures, is_first_rank, keep, log
from sbkit.logs.metric import Metrics, as_words


class Progress:
    """Show a live line on a terminal, and one plain line per epoch anywhere; rank 0 only.

    ``total_steps`` is the last step of the whole run, from which the time left is estimated.
    """

    def __init__(
        self,
        *,
        total_epochs: int,
        total_steps: int,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Print nothing yet: the live line appears with the first step."""
        first = is_first_rank()
        console = Console(
            quiet=not first, force_terminal=first and sys.stdout.isatty(), highlight=False
        )
        # No refresh thread: a thread that wakes four times a second would share the GIL.
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # a redirected stderr stays where it was sent
        )
        self._total_epochs, self._metrics = total_epochs, metrics or {}
        self._total_steps, self._clock = total_steps, clock
        self._points: deque[tuple[int, float]] = deque(maxlen=50)  # step, seconds

    def step(self, figures: StepFigures) -> None:
        """Update the live line."""
        self._points.append((figures.step, self._clock()))
        waiting = f"waiting {100 * figures.waiting:.0f} %"
        line = self._line(figures, f"lr {figures.learning_rate:.1e}", after=[waiting])
        self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def epoch(self, figures: EpochFigures) -> None:
        """Print the line of an epoch, and write it to the text log."""
        valid = [] if figures.valid_loss is None else [f"valid loss {figures.valid_loss:.3f}"]
        line = self._line(figures, *valid, *as_words(self._metrics, figures.metrics))
        if is_first_rank():
            keep(line)
        self._live.console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the live line."""
        self._live.stop()

    def _line(
        self, figures: StepFigures | EpochFigures, *words: str, after: Sequence[str] = ()
    ) -> str:
        seconds = self._seconds_left()
        skipped = [f"{figures.skipped} skipped"] if figures.skipped else []
        left = [] if seconds is None else [f"{timedelta(seconds=round(seconds))} left"]
        head = f"epoch {figures.epoch}/{self._total_epochs} step {figures.step}"
        known = [f"{figures.rtfx:.0f} RTFx", *after, *skipped, *left]
        return " ".join([head, f"loss {figures.loss:.3f}", *words, *known])

    def _seconds_left(self) -> float | None:
        """Estimate the time left at the pace of the last 50 points, None before there are two."""
        if len(self._points) < 2:
            return None
        (first_step, first_time), (step, now) = self._points[0], self._points[-1]
        seconds_per_step = (now - first_time) / max(step - first_step, 1)
        return seconds_per_step * max(self._total_steps - step, 0)


class Countdown:
    """Log how much of long work is done and how long the rest will take, every few seconds."""

    def __init__(
        self,
        what: str,
        total: int,
        *,
        every: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start now; ``total`` is the number of steps."""
        self._what, self._total, self._every, self._clock = what, total, every, clock
        self._begun = self._said = clock()
        self._done = 0

    def step(self) -> None:
        """Count one more step."""
        self._done += 1
        now = self._clock()
        if now - self._said >= self._every and self._done < self._total:
            self._said = now
            left = (now - self._begun) / self._done * (self._total - self._done)
            share = 100 * self._done // self._total
            log(f"{self._what}: {share} % done, {timedelta(seconds=round(left))} left")
