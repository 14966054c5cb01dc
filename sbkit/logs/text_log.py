"""``train.log``: what a run says, each line with its time, for when the terminal is gone."""

import os
import stat
import sys
import time
import traceback
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from sbkit.base.errors import SbkitError
from sbkit.base.text import printable
from sbkit.logs.log import heard_by, is_first_rank

TEXT_LOG = "train.log"
OPENED = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TextLog:
    """Append what a run says to ``train.log`` in its folder, warnings and its last error too.

    What is said before `open` waits for it: a run that is refused leaves the folder as it was.
    Only the first rank keeps anything.
    """

    def __init__(self, folder: Path, *, title: str) -> None:
        """Open nothing yet; ``title`` is the first line of this call."""
        self._path = folder / TEXT_LOG
        self._file: BinaryIO | None = None
        self._waiting: list[str] | None = []  # None once it is open
        self._hooks = ExitStack()
        self.write(title)

    def __enter__(self) -> Self:
        if is_first_rank():
            self._hooks.enter_context(heard_by(self.write))
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
            self.write(_last_words(error))
        if self._file is not None:
            self._file.close()

    def open(self) -> None:
        """Append from now on; raises SbkitError where no file can be."""
        if not is_first_rank():
            return
        try:
            descriptor = os.open(self._path, OPENED, 0o666)
            self._file = os.fdopen(descriptor, "ab", buffering=0)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(0, "it is no regular file")
        except OSError as error:
            raise SbkitError(
                f"The text log of the run must be a file to write to, but {self._path} is not "
                f"({error.strerror}). Move away what stands there."
            ) from error
        waiting, self._waiting = self._waiting, None
        for line in waiting or []:
            self._append(line)

    def write(self, message: str) -> None:
        """Add the lines of a message, each with the time."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        for line in message.splitlines():
            stamped = f"{now} {printable(line)}\n"
            if self._waiting is None:
                self._append(stamped)
            else:
                self._waiting.append(stamped)

    def _append(self, line: str) -> None:
        """Write a line; a run does not end because its text cannot be kept."""
        if self._file is None:
            return
        try:
            self._file.write(line.encode(errors="backslashreplace"))
        except OSError as error:
            self._file.close()
            self._file, why = None, error.strerror
            print(f"{self._path} could not be written ({why}); the run goes on.", file=sys.stderr)

    def _and_show(self, show: Any) -> Any:
        def keep_and_show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            self.write(f"warning: {category.__name__}: {message}")
            show(message, category, *rest)

        return keep_and_show


def _last_words(error: BaseException) -> str:
    """Say why a run ended before its end."""
    match error:
        case SbkitError() | OSError():
            return f"error: {error}"
        case SystemExit():
            return f"ended with exit code {error.code}"
        case KeyboardInterrupt():
            return "ended by Ctrl-C"
    return "".join(traceback.format_exception(error))
