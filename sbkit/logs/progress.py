"""Progress and time left: live on a terminal, or a line per minute or epoch in a file."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.progress import Progress as Bar
from rich.text import Text

from sbkit.logs.handlers import is_first_rank
from sbkit.logs.metric import Metrics, describe_values
from sbkit.logs.run_log import EpochFigures, StepFigures

logger = logging.getLogger(__name__)

LINE_SECONDS = 60.0  # between two lines in a file
REFRESH_SECONDS = 0.2  # between two updates of a bar

Clock = Callable[[], float]


@contextmanager
def progress_bar(
    title: str, total: float | None, *, quiet: bool = False, clock: Clock = time.perf_counter
) -> Iterator[Callable[[float], None]]:
    """Show progress on rank 0: a bar on a terminal, lines in a file.

    Yields a function that takes the amount of work done since its last call. ``total`` is in the
    same unit, or None if unknown. The bar is drawn on standard error, because standard output may
    hold a result.
    """
    console = Console(stderr=True)
    is_off = quiet or not is_first_rank()
    bar = Bar(
        console=console,
        transient=True,
        auto_refresh=False,  # for the same reason as in `Progress`
        redirect_stdout=sys.stdout.isatty(),  # piped output does not disturb the bar
        disable=is_off or not console.is_terminal,
    )
    start = last_line = clock()
    last_refresh, done = start - REFRESH_SECONDS, 0.0

    def advance(amount: float) -> None:
        nonlocal done, last_line, last_refresh
        done, now = done + amount, clock()
        if now - last_refresh >= REFRESH_SECONDS:
            last_refresh = now
            bar.update(task, completed=done, refresh=True)
        if now - last_line >= LINE_SECONDS and not is_off:
            last_line = now
            line = f"{title}: {done:,.0f} done"
            if total and 0 < done <= total:
                time_left = _as_time((now - start) * (total - done) / done)
                line = f"{title}: {done / total:.0%} done, about {time_left} left"
            logger.log(line_level(on_terminal=not bar.disable), line)

    with bar:
        task = bar.add_task(title, total=total or None)
        yield advance


def line_level(*, on_terminal: bool) -> int:
    """Return the logging level of a line; a terminal that shows it live does not need it."""
    return logging.DEBUG if on_terminal else logging.INFO


def _as_time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


class Progress:
    """On rank 0, show a live line on a terminal, and log a line per epoch.

    The estimated time left is the sum of three parts: the steps up to ``total_steps`` at the pace
    of the last steps, the remaining validations, each as long as the last one, and the work after
    the last epoch.
    """

    def __init__(
        self,
        *,
        total_epochs: int,
        total_steps: int,
        metrics: Metrics | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        on_terminal = is_first_rank() and sys.stdout.isatty()
        console = Console(quiet=not is_first_rank(), force_terminal=on_terminal, highlight=False)
        # No refresh thread: a thread that wakes four times a second would share the GIL.
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # a redirected stderr stays redirected
        )
        self._total_epochs, self._metrics = total_epochs, metrics or {}
        self._total_steps, self._clock = total_steps, clock
        self._points: deque[tuple[int, float]] = deque(maxlen=50)  # (step, seconds of training)
        self._paused_since: float | None = None
        self._paused_seconds = 0.0
        self._validation_seconds: float | None = None  # of the last one
        self._ending_seconds = 0.0  # an estimate
        self._last_line = clock()

    def pause(self) -> None:
        """Stop the training clock, and remove the live line."""
        self._paused_since = self._clock()
        self._live.stop()

    def resume(self) -> None:
        """Restart the training clock, if it is stopped."""
        if self._paused_since is not None:
            self._paused_seconds += self._clock() - self._paused_since
            self._paused_since = None

    def step(self, figures: StepFigures) -> None:
        """Update the live line; without a terminal, log it once a minute."""
        now = self._clock()
        self._points.append((figures.step, now - self._paused_seconds))
        line = self._line(
            figures,
            values=[f"lr {figures.learning_rate:.1e}"],
            waiting=f"waiting {100 * figures.data_wait_share:.0f} %",
            validations=self._total_epochs - figures.epoch + 1,
        )
        self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        if now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            logger.log(line_level(on_terminal=self._live.console.is_terminal), line)

    def epoch(
        self, figures: EpochFigures, ending: Callable[[float], float] = lambda _: 0.0
    ) -> None:
        """Log the line of an epoch.

        ending: estimates the seconds of work after the last epoch from those of a validation.
        """
        self._last_line = self._clock()
        if self._paused_since is not None:
            self._validation_seconds = self._last_line - self._paused_since
            self._ending_seconds = ending(self._validation_seconds)
        values = describe_values(self._metrics, figures.metrics)
        if figures.valid_loss is not None:
            values = [f"valid loss {figures.valid_loss:.3f}", *values]
        validations = self._total_epochs - figures.epoch
        logger.info(self._line(figures, values=values, validations=validations))

    def close(self) -> None:
        self._live.stop()

    def _line(
        self,
        figures: StepFigures | EpochFigures,
        *,
        values: Sequence[str],
        waiting: str = "",
        validations: int,
    ) -> str:
        parts = (
            f"epoch {figures.epoch}/{self._total_epochs} step {figures.step}",
            f"loss {figures.loss:.3f}",
            *values,
            f"{figures.rtfx:.0f} RTFx",
            waiting,
            f"{figures.skipped_steps} skipped" if figures.skipped_steps else "",
            self._time_left(figures.step, validations),
        )
        return " ".join(filter(None, parts))

    def _time_left(self, step: int, validations: int) -> str:
        """Estimate the time left at the pace of the last 50 points, if there are two.

        Before the first validation, only the training time is known, so the result is a minimum.
        """
        if len(self._points) < 2:
            return ""
        (first_step, first_time), (last_step, last_time) = self._points[0], self._points[-1]
        seconds_per_step = (last_time - first_time) / max(last_step - first_step, 1)
        training = seconds_per_step * max(self._total_steps - step, 0)
        if self._validation_seconds is None:
            return f"> {_as_time(training)} left"
        validating = max(validations, 0) * self._validation_seconds
        return f"{_as_time(training + validating + self._ending_seconds)} left"
