"""Send messages to the screen of a command, and to ``train.log`` of a run.

Every module logs with ``logging.getLogger(__name__)``. Only the commands of sbkit attach handlers,
so a program that uses sbkit as a library decides what is shown and where.
"""

import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Self

from sbkit.base.errors import SbkitError
from sbkit.base.messages import printable

TEXT_LOG = "train.log"
PROGRESS_LOGGER = "sbkit.logs.progress"
INSTALLED_PACKAGES = sysconfig.get_paths()["purelib"]


def is_first_rank() -> bool:
    """Return whether this process prints and writes: torchrun's RANK is 0 or not set."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def log_to_screen(*, to_stderr: bool = False, format: str = "%(message)s") -> Iterator[None]:
    """Show messages while a command runs: warnings on standard error, others on standard output.

    to_stderr: all on standard error, because standard output holds the command's result.
    """
    root = logging.getLogger()
    handler = ScreenHandler(to_stderr=to_stderr)
    handler.setFormatter(PrintableFormatter(format))
    root.addHandler(handler)
    # Progress has its own level, so that `quiet` does not hide it.
    with _level(logging.INFO), _level(logging.DEBUG, logger=PROGRESS_LOGGER):
        try:
            yield
        finally:
            root.removeHandler(handler)


@contextmanager
def _level(level: int, *, logger: str | None = None) -> Iterator[None]:
    """Set the level of a logger, or of the root, inside the block."""
    target = logging.getLogger(logger)
    before = target.level
    target.setLevel(level)
    try:
        yield
    finally:
        target.setLevel(before)


def quiet() -> AbstractContextManager[None]:
    """Drop all messages in a block, for example while `sbkit check` tries the steps of a run."""
    return _level(logging.CRITICAL + 1)


class ScreenHandler(logging.Handler):
    """Print the messages of the first rank; an error of the stream, such as EPIPE, is raised."""

    def __init__(self, *, to_stderr: bool) -> None:
        super().__init__(logging.INFO)
        self._to_stderr = to_stderr
        self.addFilter(should_log)

    def emit(self, record: logging.LogRecord) -> None:
        is_for_stderr = self._to_stderr or record.levelno >= logging.WARNING
        print(self.format(record), file=sys.stderr if is_for_stderr else sys.stdout, flush=True)


def should_log(record: logging.LogRecord) -> bool:
    """Pass messages of sbkit, recipes and the user's modules, and other packages' warnings.

    Only the first rank logs.
    """
    is_installed = record.pathname.startswith(INSTALLED_PACKAGES)
    is_ours = record.name.partition(".")[0] == "sbkit" or not is_installed
    return is_first_rank() and (is_ours or record.levelno >= logging.WARNING)


class PrintableFormatter(logging.Formatter):
    """Escape control characters: a quoted name of a folder cannot move the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).rstrip("\n").split("\n")))


class TextLog(MemoryHandler):
    """Append messages, warnings and the last error of a run to ``train.log`` in its folder.

    Messages wait in memory until `open`, so a refused run leaves the folder as it was. Only the
    first rank writes. Lines that do not fit on the disk are lost, and the run continues.

    title: the first line that this call of the command writes.
    """

    def __init__(self, folder: Path, *, title: str) -> None:
        super().__init__(capacity=1)  # no delay once there is a file
        self._path = folder / TEXT_LOG
        self.addFilter(should_log)
        self._write(title)

    def __enter__(self) -> Self:
        if is_first_rank():
            # Before the screen's handler, which raises once the terminal is gone.
            logging.getLogger().handlers.insert(0, self)
            logging.captureWarnings(True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if is_first_rank():
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(self)
        if error is not None:
            self._write(_describe_end(error))
        if isinstance(self.target, logging.Handler):
            with suppress(OSError):  # the disk is full
                self.target.close()
        self.close()

    def open(self) -> None:
        """Write the waiting messages, and append all later ones."""
        if is_first_rank():
            self.setTarget(_RunFile(self._path, encoding="utf-8", errors="backslashreplace"))
            self.flush()

    def _write(self, message: str) -> None:
        self.handle(logging.makeLogRecord({"name": "sbkit", "msg": message}))


class _RunFile(logging.FileHandler):
    """Write each line of a message with its time."""

    def format(self, record: logging.LogRecord) -> str:
        formatter = PrintableFormatter("%(message)s")
        now = formatter.formatTime(record, "%Y-%m-%d %H:%M:%S")
        return "\n".join(f"{now} {line}" for line in formatter.format(record).splitlines())

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exc_info()[1], OSError):  # an OSError: the disk is full
            super().handleError(record)


def _describe_end(error: BaseException) -> str:
    match error:
        case SbkitError() | OSError():
            return f"error: {error}"
        case SystemExit():
            return f"ended with exit code {error.code}"
        case KeyboardInterrupt():
            return "ended by Ctrl-C"
    return "".join(traceback.format_exception(error))
