"""Show progress, live or as lines of the log, and tell a watchdog of it.

A notebook shows one live line for each cell by IPython's own messages: rich needs ipywidgets there,
and clears what the cell has printed.
"""

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module

from sbkit.logs.handlers import is_first_rank, is_logged_to_screen
from sbkit.logs.metric import Metrics, describe_values
from sbkit.logs.run_log import GRADIENT, SOURCE_LOSS, VALID, EpochFigures, StepFigures

logger = logging.getLogger(__name__)

LINE_SECONDS = 60.0  # between two lines of the log
REFRESH_SECONDS = 0.2  # between two updates of a line

Clock = Callable[[], float]
Ping = Callable[[str, Sequence[str]], bool]

_ping: ContextVar[Ping] = ContextVar("ping", default=lambda phase, utterances: False)
shows_progress = ContextVar("shows_progress", default=True)

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


@contextmanager
def reporting(to: Ping | None = None, *, show_progress: bool = True) -> Iterator[None]:
    """Send the pings of a block to a watchdog, and perhaps hide its progress."""
    ping_before = _ping.set(to or _ping.get())
    shown_before = shows_progress.set(show_progress and shows_progress.get())
    try:
        yield
    finally:
        _ping.reset(ping_before)
        shows_progress.reset(shown_before)


def ping(phase: str, utterances: Sequence[str] = ()) -> bool:
    """Tell the watchdog, if any, which utterances are worked on; return whether to stop."""
    return _ping.get()(phase, utterances)


class _LiveLine:
    """A line that a terminal or a notebook shows live; elsewhere it is logged once a minute.

    Where it is shown live, it is logged for debugging only.
    """

    def __init__(self, *, to_stderr: bool, is_hidden: bool, now: float) -> None:
        from rich.console import Console  # only here: 75 ms are long for `--help`
        from rich.live import Live

        stream = sys.stderr if to_stderr else sys.stdout
        is_on_terminal = stream.isatty()  # not FORCE_COLOR, which a notebook's children inherit
        console = Console(stderr=to_stderr, force_terminal=is_on_terminal, highlight=False)
        self._is_hidden = is_hidden
        self._is_on_terminal = is_on_terminal
        self.is_in_cell = console.is_jupyter and not is_hidden
        # No refresh thread: a thread that wakes four times a second would compete for the GIL. What
        # is redirected goes above the line; what goes to a file still goes there.
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self.logged_at = now

    def show(self, line: str, now: float) -> None:
        from rich.text import Text

        if self._is_hidden:
            return
        if self.is_in_cell:
            show_in_cell(line)
        elif self._is_on_terminal:
            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        if now - self.logged_at >= LINE_SECONDS:
            self.logged_at = now
            is_live = self.is_in_cell or self._is_on_terminal
            logger.log(logging.DEBUG if is_live else logging.INFO, line)

    def close(self) -> None:
        self._live.stop()
        if self.is_in_cell:
            show_in_cell("")


@contextmanager
def progress_bar(
    title: str, total: float | None, *, clock: Clock = time.perf_counter
) -> Iterator[Callable[[float], None]]:
    """Show progress on rank 0: live on a terminal or in a notebook, else a line each minute.

    Yields a function that takes the amount of work done since its last call, in the unit of
    ``total`` (None if unknown). Standard output may hold a result, so standard error has the line.
    """
    start = clock()
    is_hidden = not (shows_progress.get() and is_first_rank())
    live_line = _LiveLine(to_stderr=True, is_hidden=is_hidden, now=start)
    done, shown_at = 0.0, start - REFRESH_SECONDS

    def advance(amount: float) -> None:
        nonlocal done, shown_at
        done += amount
        now = clock()
        if now - shown_at < REFRESH_SECONDS:
            return
        shown_at = now
        line = f"{title}: {done:,.0f} done"
        if total and 0 < done <= total:
            seconds_left = _format_duration((now - start) * (total - done) / done)
            line = f"{title}: {100 * done / total:.0f} % done, about {seconds_left} left"
        live_line.show(line, now)

    try:
        yield advance
    finally:
        live_line.close()


def _format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


@dataclass(kw_only=True, eq=False)
class TrainingProgress:
    """On rank 0, show a live line on a terminal or in a notebook, and log a line per epoch.

    The time left is estimated for the steps up to ``total_steps`` at the pace of the last ones, and
    for the remaining validations; at most what the clock leaves (``max_seconds_left``).
    """

    total_epochs: int
    total_steps: int
    metrics: Metrics = field(default_factory=dict)
    valid_interval_steps: int = 0  # between two validations within an epoch; 0: only at its end
    max_seconds_left: Clock = lambda: math.inf
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        now = self.clock()
        self._live_line = _LiveLine(to_stderr=False, is_hidden=not is_first_rank(), now=now)
        # The last steps, each with the seconds of training up to it.
        self._recent_steps: deque[tuple[int, float]] = deque(maxlen=50)
        self._paused_since: float | None = None
        self._paused_seconds = 0.0
        self._validation_seconds: float | None = None  # of the last one

    def pause(self) -> None:
        """Stop the training clock, and remove the live line."""
        self._paused_since = self.clock()
        self.close()

    def resume(self) -> None:
        """Restart the training clock, if it is stopped."""
        if self._paused_since is not None:
            self._paused_seconds += self.clock() - self._paused_since
            self._paused_since = None

    def report_step(self, figures: StepFigures) -> None:
        """Update the live line, which is logged if the last line was logged a minute ago."""
        now = self.clock()
        self._recent_steps.append((figures.step, now - self._paused_seconds))
        values = [f"lr {figures.learning_rate:.1e}"]
        waiting = f"waiting {100 * figures.data_wait_share:.0f} %"
        left = self.total_epochs - figures.epoch + 1
        line = self._line(figures, values=values, waiting_text=waiting, validations_left=left)
        self._live_line.show(line, now)

    def report_epoch(self, figures: EpochFigures) -> None:
        now = self.clock()
        self._live_line.logged_at = now
        if self._paused_since is not None:
            self._validation_seconds = now - self._paused_since
        values = describe_values(self.metrics, figures.metrics)
        if figures.valid_loss is not None:
            parts = _describe_logged(figures, of_validation=True)
            values = [f"valid loss {figures.valid_loss:.3f}", parts, *values]
        validations_left = self.total_epochs - figures.epoch
        line = self._line(figures, values=values, validations_left=validations_left)
        logger.info(line)
        if self._live_line.is_in_cell and not is_logged_to_screen(logger):
            print(line)

    def close(self) -> None:
        self._live_line.close()

    def _line(
        self,
        figures: StepFigures | EpochFigures,
        *,
        values: Sequence[str],
        waiting_text: str = "",
        validations_left: int,
    ) -> str:
        parts = (
            f"epoch {figures.epoch}/{self.total_epochs} step {figures.step}",
            f"loss {figures.loss:.3f}",
            _describe_logged(figures, of_validation=False),
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
        training = seconds_per_step * max(self.total_steps - step, 0)
        if self._validation_seconds is None:
            least = min(training, self.max_seconds_left())
            return f"> {_format_duration(least)} left"
        if self.valid_interval_steps:
            validations_left += (self.total_steps - step) // self.valid_interval_steps
        validating = max(validations_left, 0) * self._validation_seconds
        seconds = min(training + validating, self.max_seconds_left())
        return f"{_format_duration(seconds)} left"


def _describe_logged(figures: StepFigures | EpochFigures, *, of_validation: bool) -> str:
    """Write what was logged beside a loss in parentheses, without the gradient norms."""
    texts = [
        f"{name.removeprefix(VALID).removeprefix(SOURCE_LOSS)} {value:.4g}"
        for name, value in figures.logged.items()
        if name.startswith(VALID) == of_validation and not name.startswith(GRADIENT)
    ]
    return f"({', '.join(texts)})" if texts else ""
