"""The one exception that a user of sbkit is meant to read, and the codes of a command's end."""

from sbkit.base.text import printable

FAILED = 1  # as Python leaves after a traceback
BAD_INPUT = 2  # an option, too
FILES_FAILED = 3  # some of those to transcribe or classify; the others are written
STALLED = 70  # EX_SOFTWARE
ASKED_TO_STOP = 75  # EX_TEMPFAIL, "try again": everything is saved, the same command goes on
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE


class SbkitError(Exception):
    """Raised for what a user can fix: what must hold, what came instead, and what to do.

    Command lines print the message alone, without a traceback, and leave with exit code 2. What it
    quotes of others cannot move the cursor.
    """

    def __str__(self) -> str:
        """Write the sentence; a name in it with an escape sequence would clear the screen."""
        return printable(super().__str__())
