"""Progress and time left: live on a terminal; in a file, a line per minute or epoch."""

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
    """Show the progress of some work: a bar on a terminal, lines in a file; rank 0 only.

    Yields a function that is called with the amount of work done since its last call. ``total`` is
    in the same unit, or None if unknown. The bar is drawn on standard error, because standard
    output may hold a result.
    """
    # Piped output does not pass the terminal.
    console, on_terminal = Console(stderr=True), sys.stdout.isatty()
    is_off = quiet or not is_first_rank()
    bar = Bar(
        console=console,
        transient=True,
        auto_refresh=False,  # for the same reason as in `Progress`
        redirect_stdout=on_terminal,
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
            line = f"{title}: {_describe(done, total, now - start)}"
            logger.log(level_of(is_shown=not bar.disable), line)

    with bar:
        task = bar.add_task(title, total=total or None)
        yield advance


def _describe(done: float, total: float | None, seconds: float) -> str:
    """Describe the part done, and the time for the rest at the same pace."""
    if not total or not 0 < done <= total:
        return f"{done:,.0f} done"
    return f"{done / total:.0%} done, about {_as_time(seconds * (total - done) / done)} left"


def level_of(*, is_shown: bool) -> int:
    """Return the level of a progress line: only the text log needs what a terminal shows live."""
    return logging.DEBUG if is_shown else logging.INFO


def _as_time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


class Progress:
    """Show a live line on a terminal, and log one line per epoch; rank 0 only.

    The time left is estimated from ``total_steps``, the last step of the run, at the pace of the
    last steps, from the remaining validations, each as long as the last one, and from the work
    after the last epoch.
    """

    def __init__(
        self,
        *,
        total_epochs: int,
        total_steps: int,
        metrics: Metrics | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        first = is_first_rank()
        console = Console(
            quiet=not first, force_terminal=first and sys.stdout.isatty(), highlight=False
        )
        # No refresh thread: a thread that wakes four times a second would share the GIL.
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # a redirected stderr stays redirected
        )
        self._total_epochs, self._metrics = total_epochs, metrics or {}
        self._total_steps, self._clock = total_steps, clock
        self._points: deque[tuple[int, float]] = deque(maxlen=50)  # step, seconds of training
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
        time_left = self._time_left(figures, validations=self._total_epochs - figures.epoch + 1)
        words = [f"lr {figures.learning_rate:.1e}"]
        line = self._line(figures, words, [f"waiting {100 * figures.waiting:.0f} %"], time_left)
        self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        if now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            logger.log(level_of(is_shown=self._live.console.is_terminal), line)

    def epoch(
        self, figures: EpochFigures, ending: Callable[[float], float] = lambda _: 0.0
    ) -> None:
        """Log the line of an epoch.

        ending: estimates the seconds after the last epoch from the seconds of a validation.
        """
        self._last_line = self._clock()
        if self._paused_since is not None:
            self._validation_seconds = self._last_line - self._paused_since
            self._ending_seconds = ending(self._validation_seconds)
        time_left = self._time_left(figures, validations=self._total_epochs - figures.epoch)
        valid = [] if figures.valid_loss is None else [f"valid loss {figures.valid_loss:.3f}"]
        words = [*valid, *describe_values(self._metrics, figures.metrics)]
        logger.info(self._line(figures, words, [], time_left))

    def close(self) -> None:
        self._live.stop()

    def _line(
        self,
        figures: StepFigures | EpochFigures,
        words: Sequence[str],
        after: Sequence[str],
        time_left: Sequence[str],
    ) -> str:
        skipped = [f"{figures.skipped} skipped"] if figures.skipped else []
        head = f"epoch {figures.epoch}/{self._total_epochs} step {figures.step}"
        tail = [f"{figures.rtfx:.0f} RTFx", *after, *skipped, *time_left]
        return " ".join([head, f"loss {figures.loss:.3f}", *words, *tail])

    def _time_left(self, figures: StepFigures | EpochFigures, *, validations: int) -> list[str]:
        """Estimate the time left at the pace of the last 50 points, if there are two.

        Before the first validation, only the training time is known, so the result is a minimum.
        """
        if len(self._points) < 2:
            return []
        (first_step, first_time), (step, now) = self._points[0], self._points[-1]
        seconds_per_step = (now - first_time) / max(step - first_step, 1)
        training = seconds_per_step * max(self._total_steps - figures.step, 0)
        if self._validation_seconds is None:
            return [f"> {_as_time(training)} left"]
        validating = max(validations, 0) * self._validation_seconds
        return [f"{_as_time(training + validating + self._ending_seconds)} left"]
