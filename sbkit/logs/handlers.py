"""Send messages to the screen of a command, and to ``train.log`` of a run.

Only the commands of sbkit attach handlers: a program that uses it decides what is shown and where.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Self

from sbkit.base.errors import ASKED_TO_STOP, SbkitError, StopRequestedError
from sbkit.base.libraries import is_library
from sbkit.base.messages import printable
from sbkit.base.process import drop_unwritable

TEXT_LOG = "train.log"


def is_first_rank() -> bool:
    """Return whether this process may print and write: rank 0, or a process without torchrun."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def log_to_screen(*, to_stderr: bool = False, format: str = "%(message)s") -> Iterator[None]:
    """Show messages while a command runs: warnings on standard error, others on standard output.

    to_stderr: all on standard error, because standard output holds the command's result.

    >>> with log_to_screen():  # doctest: +SKIP
    ...     brain.fit(epochs, loaders.train, loaders.valid)
    """
    root = logging.getLogger()
    handler = ScreenHandler(to_stderr=to_stderr)
    handler.setFormatter(PrintableFormatter(format))
    root.addHandler(handler)
    # Progress has its own level, so that `quiet` does not hide it.
    with (
        drop_unwritable("stderr", *(() if to_stderr else ("stdout",))),
        _temporary_level(logging.INFO),
        _temporary_level(logging.DEBUG, logger_name="sbkit.logs.progress"),
    ):
        try:
            yield
        finally:
            root.removeHandler(handler)


def is_logged_to_screen(logger: logging.Logger) -> bool:
    """Return whether the program shows a logger's messages, not only writes them to a run."""
    handlers = (*logging.getLogger("sbkit").handlers, *logging.getLogger().handlers)
    shows = any(not isinstance(handler, TextLog) for handler in handlers)
    return shows and logger.isEnabledFor(logging.INFO)


@contextmanager
def _temporary_level(level: int, *, logger_name: str | None = None) -> Iterator[None]:
    """Set the level of a logger, or of the root, inside the block."""
    logger = logging.getLogger(logger_name)
    level_before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(level_before)


def quiet() -> AbstractContextManager[None]:
    """Drop messages in a block, except from loggers with their own level, such as progress."""
    return _temporary_level(logging.CRITICAL + 1)


class ScreenHandler(logging.Handler):
    """Print the messages of the first rank."""

    def __init__(self, *, to_stderr: bool) -> None:
        super().__init__(logging.INFO)
        self._to_stderr = to_stderr
        self.addFilter(should_log)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
        except Exception:  # a library's arguments do not fit its message
            self.handleError(record)
            return
        print_line(message, to_stderr=self._to_stderr or record.levelno >= logging.WARNING)


def print_line(line: str, *, to_stderr: bool = False) -> None:
    """Print a line above the bars of progress."""
    from tqdm import tqdm

    stream = sys.stderr if to_stderr else sys.stdout
    tqdm.write(line, file=stream)
    stream.flush()


def should_log(record: logging.LogRecord) -> bool:
    """Return whether a message is logged: only on rank 0, and from packages only warnings."""
    if not is_first_rank():
        return False
    is_ours = record.name.partition(".")[0] in ("sbkit", "recipes")
    return is_ours or not is_library(record.pathname) or record.levelno >= logging.WARNING


class PrintableFormatter(logging.Formatter):
    """Escape control characters: a message may quote a file name that moves the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).rstrip("\n").split("\n")
        return "\n".join(printable(line) for line in lines)


class TextLog(MemoryHandler):
    """Append messages, warnings and the last error of a run to ``train.log`` in its folder.

    Messages wait in memory until `open`, so a refused run leaves the folder as it was. Only the
    first rank writes. Lines that do not fit on the disk are lost, and the run continues.

    title: the line with which this run of the command begins.
    """

    def __init__(self, folder: Path, *, title: str) -> None:
        super().__init__(capacity=1)  # no delay once there is a file
        self._path = folder / TEXT_LOG
        self.addFilter(should_log)
        self._write(title)

    def __enter__(self) -> Self:
        if is_first_rank():
            # Before the screen's handler, which waits for a terminal that Ctrl-S stopped.
            logging.getLogger().handlers.insert(0, self)
            logging.captureWarnings(True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if is_first_rank():
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(self)
        match error:
            case SbkitError() | OSError():
                self._write(f"error: {error}")
            case StopRequestedError():
                self._write(f"{error}\nended with exit code {ASKED_TO_STOP}")
            case KeyboardInterrupt():
                self._write("ended by Ctrl-C")
            case BaseException():
                self._write("".join(traceback.format_exception(error)))
        if isinstance(self.target, logging.Handler):
            with suppress(OSError):  # the disk is full
                self.target.close()
        self.close()

    def open(self) -> None:
        """Write the waiting messages, and append all later ones."""
        if is_first_rank():
            self.setTarget(
                _TimestampedFileHandler(self._path, encoding="utf-8", errors="backslashreplace")
            )
            self.flush()

    def _write(self, message: str) -> None:
        self.handle(logging.makeLogRecord({"name": "sbkit", "msg": message}))


class _TimestampedFileHandler(logging.FileHandler):
    """Write each line of a message with its time."""

    def format(self, record: logging.LogRecord) -> str:
        formatter = PrintableFormatter("%(message)s")
        time = formatter.formatTime(record, "%Y-%m-%d %H:%M:%S")
        lines = formatter.format(record).split("\n")
        return "\n".join(f"{time} {line}" for line in lines)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exc_info()[1], OSError):  # the disk is full
            super().handleError(record)
