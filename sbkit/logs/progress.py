"""Show progress, live or as lines of the log, and tell a watchdog of it.

A notebook shows one live line for each cell by IPython's own messages, which every front end
understands. rich needs ipywidgets there, and clears what the cell has printed.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import Progress as Bar
from rich.text import Text

from sbkit.logs.handlers import is_first_rank, is_logged_to_screen
from sbkit.logs.metric import Metrics, describe_values
from sbkit.logs.run_log import EpochFigures, StepFigures

logger = logging.getLogger(__name__)

LINE_SECONDS = 60.0  # between two lines of the log
REFRESH_SECONDS = 0.2  # between two updates of a bar

Clock = Callable[[], float]

_shown_cell = 0  # the number of the last cell that shows a line


def show_in_cell(text: str) -> None:
    """Show a live line in the output of the notebook's present cell, or replace it."""
    global _shown_cell
    ipython = import_module("IPython")
    cell: int = ipython.get_ipython().execution_count
    is_shown = cell == _shown_cell
    if text or is_shown:
        name = f"sbkit-{cell}"
        data = {"text/plain": text}
        ipython.display.display(data, raw=True, display_id=name, update=is_shown)
        _shown_cell = cell


class Ping(Protocol):
    """Tells a watchdog where the work is: its phase, and the ids of the utterances worked on.

    Returns whether the work is to stop.
    """

    def __call__(self, phase: str, utterances: Sequence[str] = ()) -> bool: ...


def no_ping(phase: str, utterances: Sequence[str] = ()) -> bool:
    """Return False: there is no watchdog, and nothing stops the work."""
    return False


@contextmanager
def progress_bar(
    title: str, total: float | None, *, quiet: bool = False, clock: Clock = time.perf_counter
) -> Iterator[Callable[[float], None]]:
    """Show progress on rank 0: live on a terminal or in a notebook, else a line each minute.

    Yields a function that takes the amount of work done since its last call. ``total`` is in the
    same unit, or None if unknown. The bar is drawn on standard error, because standard output may
    hold a result.
    """
    on_terminal = sys.stderr.isatty()  # not FORCE_COLOR, which a notebook's children inherit
    console = Console(stderr=True, force_terminal=on_terminal)
    is_hidden = quiet or not is_first_rank()
    bar = Bar(
        console=console,
        transient=True,
        auto_refresh=False,  # a thread that redraws the bar would compete for the GIL
        redirect_stdout=sys.stdout.isatty(),  # piped output does not disturb the bar
        disable=is_hidden or not on_terminal,
    )
    with nullcontext() if bar.disable else bar:  # rich before 14.3 would print an empty line
        reporter = _Reporter(bar, title, total, is_hidden=is_hidden, clock=clock)
        try:
            yield reporter.advance
        finally:
            reporter.close()


class _Reporter:
    """Counts the work done, and reports it live and in the log."""

    def __init__(
        self, bar: Bar, title: str, total: float | None, *, is_hidden: bool, clock: Clock
    ) -> None:
        self._bar = bar
        self._is_in_cell = bar.console.is_jupyter and not is_hidden
        self._task = bar.add_task(title, total=total or None)
        self._title = title
        self._total = total
        self._is_hidden = is_hidden
        self._clock = clock
        self._start = clock()
        self._last_line = self._start
        self._last_refresh = self._start - REFRESH_SECONDS
        self._done = 0.0

    def advance(self, amount: float) -> None:
        self._done += amount
        now = self._clock()
        if now - self._last_refresh >= REFRESH_SECONDS:
            self._last_refresh = now
            self._bar.update(self._task, completed=self._done, refresh=True)
            if self._is_in_cell:
                show_in_cell(self._line(now))
        if now - self._last_line >= LINE_SECONDS and not self._is_hidden:
            self._last_line = now
            is_live = self._is_in_cell or not self._bar.disable
            logger.log(logging.DEBUG if is_live else logging.INFO, self._line(now))

    def close(self) -> None:
        if self._is_in_cell:
            show_in_cell("")

    def _line(self, now: float) -> str:
        if not self._total or not 0 < self._done <= self._total:
            return f"{self._title}: {self._done:,.0f} done"
        seconds_left = (now - self._start) * (self._total - self._done) / self._done
        percent = 100 * self._done / self._total
        return f"{self._title}: {percent:.0f} % done, about {_format_duration(seconds_left)} left"


def _format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class TrainingProgress:
    """On rank 0, show a live line on a terminal or in a notebook, and log a line per epoch.

    A notebook whose program has set up no logging gets the lines of epochs as well.

    The estimated time left is that of training: the steps up to ``total_steps`` at the pace of the
    last steps, and the remaining validations, each as long as the last one.
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
        # No refresh thread: a thread that wakes four times a second would compete for the GIL.
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # errors that go to a file still go there
        )
        self._is_in_cell = console.is_jupyter and is_first_rank()
        self._total_epochs = total_epochs
        self._total_steps = total_steps
        self._metrics = metrics or {}
        self._clock = clock
        # The last steps, each with the seconds of training up to it.
        self._recent_steps: deque[tuple[int, float]] = deque(maxlen=50)
        self._paused_since: float | None = None
        self._paused_seconds = 0.0
        self._validation_seconds: float | None = None  # of the last one
        self._last_line = clock()

    def pause(self) -> None:
        """Stop the training clock, and remove the live line."""
        self._paused_since = self._clock()
        self.close()

    def resume(self) -> None:
        """Restart the training clock, if it is stopped."""
        if self._paused_since is not None:
            self._paused_seconds += self._clock() - self._paused_since
            self._paused_since = None

    def report_step(self, figures: StepFigures) -> None:
        """Update the live line, and log it if the last line was logged a minute ago.

        Where the line is shown live, it is logged for debugging only.
        """
        now = self._clock()
        self._recent_steps.append((figures.step, now - self._paused_seconds))
        line = self._line(
            figures,
            values=[f"lr {figures.learning_rate:.1e}"],
            waiting_text=f"waiting {100 * figures.data_wait_share:.0f} %",
            validations_left=self._total_epochs - figures.epoch + 1,
        )
        if self._is_in_cell:
            show_in_cell(line)
        else:
            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        if now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            is_live = self._is_in_cell or self._live.console.is_terminal
            logger.log(logging.DEBUG if is_live else logging.INFO, line)

    def report_epoch(self, figures: EpochFigures) -> None:
        """Log the line of an epoch."""
        now = self._clock()
        self._last_line = now
        if self._paused_since is not None:
            self._validation_seconds = now - self._paused_since
        values = describe_values(self._metrics, figures.metrics)
        if figures.valid_loss is not None:
            values = [f"valid loss {figures.valid_loss:.3f}", *values]
        validations_left = self._total_epochs - figures.epoch
        line = self._line(figures, values=values, validations_left=validations_left)
        logger.info(line)
        if self._is_in_cell and not is_logged_to_screen(logger):
            print(line)

    def close(self) -> None:
        """Remove the live line."""
        self._live.stop()
        if self._is_in_cell:
            show_in_cell("")

    def _line(
        self,
        figures: StepFigures | EpochFigures,
        *,
        values: Sequence[str],
        waiting_text: str = "",
        validations_left: int,
    ) -> str:
        source_losses = [f"{name} {loss:.3f}" for name, loss in figures.source_losses.items()]
        parts = (
            f"epoch {figures.epoch}/{self._total_epochs} step {figures.step}",
            f"loss {figures.loss:.3f}",
            f"({', '.join(source_losses)})" if source_losses else "",
            *values,
            f"{figures.rtfx:.0f} RTFx",
            waiting_text,
            f"{figures.skipped_steps} skipped" if figures.skipped_steps else "",
            self._time_left(figures.step, validations_left),
        )
        return " ".join(filter(None, parts))

    def _time_left(self, step: int, validations_left: int) -> str:
        """Estimate the time of training left at the pace of the recent steps, if there are two.

        Before the first validation, only the training time is known, so the result is a minimum.
        """
        if len(self._recent_steps) < 2:
            return ""
        first_step, first_seconds = self._recent_steps[0]
        last_step, last_seconds = self._recent_steps[-1]
        seconds_per_step = (last_seconds - first_seconds) / max(last_step - first_step, 1)
        training = seconds_per_step * max(self._total_steps - step, 0)
        if self._validation_seconds is None:
            return f"> {_format_duration(training)} left"
        validating = max(validations_left, 0) * self._validation_seconds
        return f"{_format_duration(training + validating)} left"
