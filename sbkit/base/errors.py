"""Exceptions whose messages are written for users, and the exit codes of commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sbkit.base.messages import printable, shorten

FAILED = 1  # Python's own after a traceback
BAD_INPUT = 2  # also for wrong options
PARTLY_DONE = 3  # some files, lines, or the export of a run failed; the others are written
ASKED_TO_STOP = 75  # EX_TEMPFAIL, "try again": all is saved, and the same command resumes
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE
# Raised by faults of code, also by a library of another version; never a verdict on input.
CODE_FAULTS = (TypeError, AttributeError, ImportError, NameError)
# These, too, if no sentence says what is wrong: the same data or code would raise them again.
LASTING_FAULTS = (*CODE_FAULTS, ValueError, LookupError, ArithmeticError, AssertionError)


class SbkitError(Exception):
    """Raised for an error that a user can fix; says what must hold, what was given, what to do.

    A command prints the message without a traceback and exits with code 2. Control characters are
    escaped: a quoted name with an escape sequence could clear the screen. Long texts are shortened.

    keys: the path of the key of a YAML in which to correct it, such as ("Transformer", "dropout").
    file, line: another file in which to correct it, and the line, if one is known.
    """

    exit_code = BAD_INPUT

    def __init__(
        self, message: str, *, keys: tuple[str | int, ...] = (), file: str = "", line: int = 0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.keys = keys
        self.file = file
        self.line = line

    def __str__(self) -> str:
        return shorten(printable(shorten(self.message)))  # an escape is longer


@contextmanager
def concerning(*keys: str | int) -> Iterator[None]:
    """Attach these keys to an SbkitError raised in the block, unless it has keys already."""
    try:
        yield
    except SbkitError as error:
        error.keys = error.keys or keys
        raise


@contextmanager
def translate(
    errors: type[Exception] | tuple[type[Exception], ...],
    to: Callable[[str], SbkitError],
    sentence: Callable[[Any], str | None] | str,
    *,
    unchanged: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Raise ``to(sentence)`` in place of one of ``errors``, except an SbkitError.

    sentence: may be a function of the error, which is raised unchanged if that returns None.
    unchanged: errors that pass as they are, such as CODE_FAULTS.
    """
    try:
        yield
    except errors as error:
        if isinstance(error, (SbkitError, *unchanged)):
            raise
        message = sentence if isinstance(sentence, str) else sentence(error)
        if message is None:
            raise
        raise to(message) from error


class OtherRankError(SbkitError):
    """Raised on ranks that end because another rank has ended; that rank reports its error.

    code: the exit code of that rank.
    """

    def __init__(self, code: int) -> None:
        super().__init__("Another process of this run has ended; its error says why.")
        self.exit_code = code


class StopRequestedError(KeyboardInterrupt):
    """Raised when Ctrl-C or a stop signal ends a run; the message says what is saved.

    `except KeyboardInterrupt` catches it in a script. A command exits with ASKED_TO_STOP.
    """


class ConfigError(SbkitError):
    """Raised for a YAML, an override or a command-line option that cannot work."""


class DataError(SbkitError):
    """Raised for a corpus, a table, an audio file or a text that cannot be used."""


class StoreError(SbkitError):
    """Raised for a store or network disk that is away: the same command may succeed later."""


class BundleError(SbkitError):
    """Raised for a bundle, a checkpoint or a run folder that is damaged, missing or unsuitable."""


class ExportError(BundleError):
    """Raised at the end of `Run.train` if the results are written, but no bundle is."""

    exit_code = PARTLY_DONE


class DeviceError(SbkitError):
    """Raised if a requested device, precision or runtime is not available."""
