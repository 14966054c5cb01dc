"""Show progress by tqdm and in the log, and tell a watchdog of it."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta

from sbkit.logs.handlers import is_first_rank, is_logged_to_screen
from sbkit.logs.metric import Metrics, describe_values
from sbkit.logs.run_log import GRADIENT, SOURCE_LOSS, VALID, EpochFigures, StepFigures

logger = logging.getLogger(__name__)

LINE_SECONDS = 60.0  # between two lines of the log

Clock = Callable[[], float]
Ping = Callable[[str, Sequence[str]], bool]

_ping: ContextVar[Ping] = ContextVar("ping", default=lambda phase, utterances: False)
shows_progress = ContextVar("shows_progress", default=True)


@contextmanager
def reporting(to: Ping | None = None, *, show_progress: bool = True) -> Iterator[None]:
    """Send pings inside the block to a watchdog, and optionally hide its progress."""
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


class _Bar:
    """A bar of tqdm on a terminal, or in a notebook with ipywidgets.

    Its text is logged once a minute, at the level DEBUG if the bar is visible.
    """

    def __init__(
        self, title: str, clock: Clock, *, to_stderr: bool, is_hidden: bool, share: float = 0.0
    ) -> None:
        from tqdm.auto import tqdm  # imported here, because 40 ms would delay `--help`

        tqdm.monitor_interval = 0  # no thread in a process that forks
        self._bar = tqdm(
            desc=title,
            total=1.0,
            initial=share,
            bar_format="{desc} {bar}",
            file=sys.stderr if to_stderr else sys.stdout,
            dynamic_ncols=True,
            leave=False,
            miniters=0,
            disable=is_hidden or None,  # None: without a terminal or a notebook
        )
        self._clock = clock
        self._is_hidden = is_hidden
        self._first_share = share
        self._start = self.logged_at = clock()

    def time_left(self, share: float) -> str:
        """Estimate the time left at the mean pace so far, if there is one."""
        if share <= self._first_share:
            return ""
        pace = (self._clock() - self._start) / (share - self._first_share)
        return f"{timedelta(seconds=round(pace * (1 - share)))} left"

    def show(self, text: str, share: float) -> None:
        """Show a text and the share of the work that is done."""
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(share - self._bar.n)
        now = self._clock()
        if now - self.logged_at >= LINE_SECONDS and not self._is_hidden:
            self.logged_at = now
            logger.log(logging.INFO if self._bar.disable else logging.DEBUG, text)

    def close(self) -> None:
        self._bar.n = self._bar.total  # a notebook would keep an unfinished bar
        self._bar.close()


@contextmanager
def progress_bar(
    title: str, total: float | None, *, clock: Clock = time.perf_counter
) -> Iterator[Callable[[float], None]]:
    """Show progress on rank 0: a bar on a terminal or in a notebook, else a line each minute.

    Yields a function that takes the amount of work done since its last call, in the unit of
    ``total`` (None if unknown). Standard output may hold a result, so standard error has the bar.
    """
    is_hidden = not (shows_progress.get() and is_first_rank())
    bar = _Bar(title, clock, to_stderr=True, is_hidden=is_hidden)
    done = 0.0

    def advance(amount: float) -> None:
        nonlocal done
        done += amount
        share = min(done / total, 1.0) if total else 0.0
        text = f"{title}: {done:,.0f} done"
        if share:
            text = f"{title}: {100 * share:.0f} % done, about {bar.time_left(share)}"
        bar.show(text, share)

    try:
        yield advance
    finally:
        bar.close()


@dataclass(kw_only=True, eq=False)
class TrainingProgress:
    """On rank 0, show a bar on a terminal or in a notebook, and log a line per epoch.

    The time left is estimated at the mean pace of steps and validations since the first figures.

    clock_share: the share of `max_minutes` that is over.
    """

    total_epochs: int
    total_steps: int
    metrics: Metrics = field(default_factory=dict)
    clock_share: Callable[[], float] = lambda: 0.0
    clock: Clock = time.perf_counter
    _bar: _Bar | None = None

    def report_step(self, figures: StepFigures) -> None:
        """Update the bar, whose text is logged if the last line was logged a minute ago."""
        share = self._share(figures)
        if self._bar is None:
            is_hidden = not is_first_rank()
            self._bar = _Bar("", self.clock, to_stderr=False, is_hidden=is_hidden, share=share)
        values = [f"lr {figures.learning_rate:.1e}"]
        waiting = f"waiting {100 * figures.data_wait_share:.0f} %"
        self._bar.show(self._line(figures, values=values, waiting_text=waiting), share)

    def report_epoch(self, figures: EpochFigures) -> None:
        if self._bar is not None:
            self._bar.logged_at = self.clock()
        values = describe_values(self.metrics, figures.metrics)
        if figures.valid_loss is not None:
            parts = _describe_logged(figures, of_validation=True)
            values = [f"valid loss {figures.valid_loss:.3f}", parts, *values]
        line = self._line(figures, values=values)
        logger.info(line)
        if "ipykernel.zmqshell" in sys.modules and not is_logged_to_screen(logger):
            print(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _share(self, figures: StepFigures | EpochFigures) -> float:
        share_of_steps = figures.step / self.total_steps if self.total_steps else 0.0
        return min(max(share_of_steps, self.clock_share()), 1.0)

    def _line(
        self,
        figures: StepFigures | EpochFigures,
        *,
        values: Sequence[str],
        waiting_text: str = "",
    ) -> str:
        parts = (
            f"epoch {figures.epoch}/{self.total_epochs} step {figures.step}",
            f"loss {figures.loss:.3f}",
            _describe_logged(figures, of_validation=False),
            *values,
            f"{figures.rtfx:.0f} RTFx",
            waiting_text,
            f"{figures.skipped_steps} skipped" if figures.skipped_steps else "",
            "" if self._bar is None else self._bar.time_left(self._share(figures)),
        )
        return " ".join(filter(None, parts))


def _describe_logged(figures: StepFigures | EpochFigures, *, of_validation: bool) -> str:
    """Write the figures logged beside a loss in parentheses, without the gradient norms."""
    texts = [
        f"{name.removeprefix(VALID).removeprefix(SOURCE_LOSS)} {value:.4g}"
        for name, value in figures.logged.items()
        if name.startswith(VALID) == of_validation and not name.startswith(GRADIENT)
    ]
    return f"({', '.join(texts)})" if texts else ""
