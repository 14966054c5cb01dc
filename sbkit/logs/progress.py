"""How far long work is, and how long it will take: live on a terminal, in a file by lines.

Where a line is no epoch's, a file gets one each minute.
"""

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
from sbkit.logs.metric import Metrics, as_words
from sbkit.logs.run_log import EpochFigures, StepFigures

logger = logging.getLogger(__name__)

LINE_EVERY = 60.0  # seconds between two lines in a file
SHOW_EVERY = 0.2  # seconds between two looks at a bar

Clock = Callable[[], float]


@contextmanager
def shown(
    title: str, total: float | None, *, quiet: bool = False, clock: Clock = time.perf_counter
) -> Iterator[Callable[[float], None]]:
    """Show how much of some work is done: a bar on a terminal, lines in a file; rank 0 only.

    Yields what is called with how much was done since; ``total`` is in the same unit, None where it
    is not known. Standard output may be the result, so all goes to standard error.
    """
    # What is piped away does not pass the terminal.
    console, on_terminal = Console(stderr=True), sys.stdout.isatty()
    is_off = quiet or not is_first_rank()
    bar = Bar(
        console=console,
        transient=True,
        auto_refresh=False,  # as of the live line of `Progress`
        redirect_stdout=on_terminal,
        disable=is_off or not console.is_terminal,
    )
    began = said = clock()
    seen, done = began - SHOW_EVERY, 0.0

    def advance(by: float) -> None:
        nonlocal done, said, seen
        done, now = done + by, clock()
        if now - seen >= SHOW_EVERY:
            seen = now
            bar.update(task, completed=done, refresh=True)
        if now - said >= LINE_EVERY and not is_off:
            said = now
            line = f"{title}: {_share(done, total, now - began)}"
            logger.log(level_of(is_shown=not bar.disable), line)

    with bar:
        task = bar.add_task(title, total=total or None)
        yield advance


def _share(done: float, total: float | None, seconds: float) -> str:
    """Write how much is done, and how long the rest will take at the same pace."""
    if not total or not 0 < done <= total:
        return f"{done:,.0f} done"
    return f"{done / total:.0%} done, about {_as_time(seconds * (total - done) / done)} left"


def level_of(*, is_shown: bool) -> int:
    """Return the level of a progress line: only the text log needs what a terminal shows live."""
    return logging.DEBUG if is_shown else logging.INFO


def _as_time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


class Progress:
    """Show a live line on a terminal, and one plain line per epoch anywhere; rank 0 only.

    ``total_steps`` is the last step of the whole run, from which the time left is estimated: of
    the training to come at the pace of the last steps, the validations to come, each as long as the
    last one, and what follows them.
    """

    def __init__(
        self,
        *,
        total_epochs: int,
        total_steps: int,
        metrics: Metrics | None = None,
        clock: Clock = time.perf_counter,
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
        self._points: deque[tuple[int, float]] = deque(maxlen=50)  # step, seconds of training
        self._paused: float | None = None  # since when nothing is trained
        self._elsewhere = 0.0  # seconds in which nothing was trained
        self._validation: float | None = None  # seconds of the last one
        self._ending = 0.0  # seconds, an estimate
        self._said = clock()

    def pause(self) -> None:
        """Stop the clock of training, and remove the live line."""
        self._paused = self._clock()
        self._live.stop()

    def go_on(self) -> None:
        """Start the clock of training again, where it stands still."""
        if self._paused is not None:
            self._elsewhere += self._clock() - self._paused
            self._paused = None

    def step(self, figures: StepFigures) -> None:
        """Update the live line; where there is none, print it once in a while."""
        now = self._clock()
        self._points.append((figures.step, now - self._elsewhere))
        left = self._left(figures, validations=self._total_epochs - figures.epoch + 1)
        words = [f"lr {figures.learning_rate:.1e}"]
        line = self._line(figures, words, [f"waiting {100 * figures.waiting:.0f} %"], left)
        self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        if now - self._said >= LINE_EVERY:
            self._said = now
            logger.log(level_of(is_shown=self._live.console.is_terminal), line)

    def epoch(
        self, figures: EpochFigures, ending: Callable[[float], float] = lambda _: 0.0
    ) -> None:
        """Print the line of an epoch, and write it to the text log.

        ending: from the seconds of a validation to those that follow the last one.
        """
        self._said = self._clock()
        if self._paused is not None:
            self._validation = self._said - self._paused
            self._ending = ending(self._validation)
        left = self._left(figures, validations=self._total_epochs - figures.epoch)
        valid = [] if figures.valid_loss is None else [f"valid loss {figures.valid_loss:.3f}"]
        words = [*valid, *as_words(self._metrics, figures.metrics)]
        logger.info(self._line(figures, words, [], left))

    def close(self) -> None:
        """Remove the live line."""
        self._live.stop()

    def _line(
        self,
        figures: StepFigures | EpochFigures,
        words: Sequence[str],
        after: Sequence[str],
        left: Sequence[str],
    ) -> str:
        skipped = [f"{figures.skipped} skipped"] if figures.skipped else []
        head = f"epoch {figures.epoch}/{self._total_epochs} step {figures.step}"
        known = [f"{figures.rtfx:.0f} RTFx", *after, *skipped, *left]
        return " ".join([head, f"loss {figures.loss:.3f}", *words, *known])

    def _left(self, figures: StepFigures | EpochFigures, *, validations: int) -> list[str]:
        """Estimate the time left at the pace of the last 50 points; nothing before there are two.

        Before the first validation only that of training is known: there will be more.
        """
        if len(self._points) < 2:
            return []
        (first_step, first_time), (step, now) = self._points[0], self._points[-1]
        seconds_per_step = (now - first_time) / max(step - first_step, 1)
        training = seconds_per_step * max(self._total_steps - figures.step, 0)
        if self._validation is None:
            return [f"> {_as_time(training)} left"]
        return [
            f"{_as_time(training + max(validations, 0) * self._validation + self._ending)} left"
        ]
