"""``train.log``: the messages of a run, each line with its time."""

import time
import traceback
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from sbkit.base.errors import SbkitError
from sbkit.base.text import printable
from sbkit.logs.log import is_first_rank, sent_to

TEXT_LOG = "train.log"


class TextLog:
    """Append messages, warnings and the last error of a run to ``train.log`` in its folder.

    Messages wait until `open`: a run that is refused leaves the folder as it was. Only the first
    rank writes. What does not fit on the disk is lost, and the run goes on.
    """

    def __init__(self, folder: Path, *, title: str) -> None:
        """Open nothing yet; ``title`` is the first line of this call."""
        self._path = folder / TEXT_LOG
        self._file: TextIO | None = None
        self._waiting: list[str] = []
        self._hooks = ExitStack()
        self.write(title)

    def __enter__(self) -> Self:
        if is_first_rank():
            self._hooks.enter_context(sent_to(self.write))
            self._hooks.callback(setattr, warnings, "showwarning", warnings.showwarning)
            warnings.showwarning = self._and_show(warnings.showwarning)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.close()
        if error is not None:
            self.write(_describe_end(error))
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def open(self) -> None:
        """Write what waits, and append from now on."""
        if is_first_rank():
            self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
            self._append(self._waiting)

    def write(self, message: str) -> None:
        """Add the lines of a message, each with the time."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._append([f"{now} {printable(line)}\n" for line in message.splitlines()])

    def _append(self, lines: list[str]) -> None:
        if self._file is None:
            self._waiting += lines
            return
        with suppress(OSError):
            self._file.writelines(lines)
            self._file.flush()

    def _and_show(self, show: Any) -> Any:
        def keep_and_show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            self.write(f"warning: {category.__name__}: {message}")
            show(message, category, *rest)

        return keep_and_show


def _describe_end(error: BaseException) -> str:
    """Describe why a run ended early."""
    match error:
        case SbkitError() | OSError():
            return f"error: {error}"
        case SystemExit():
            return f"ended with exit code {error.code}"
        case KeyboardInterrupt():
            return "ended by Ctrl-C"
    return "".join(traceback.format_exception(error))
