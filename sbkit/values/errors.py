"""The one exception that a user of sbkit is meant to read, and how a command leaves with it."""

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

BAD_INPUT = 2
STALLED = 70  # EX_SOFTWARE
ASKED_TO_STOP = 75  # EX_TEMPFAIL, "try again": everything is saved, the same command goes on
AFTER_THE_FIRST = 3.0  # seconds
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE


class SbkitError(Exception):
    """Tell a user what must hold, what came instead, and what to do.

    Command lines print the message alone, without a traceback, and leave with exit code 2.
    """


def exit_with_sentence(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and leave with its exit code; bad input leaves a sentence, not a traceback."""
    try:
        code = main() or 0
        sys.stdout.flush()  # a reader that has left is noticed here, not while Python shuts down
    except SbkitError as error:
        _let_the_first_rank_speak()
        print(error, file=sys.stderr)
        code = BAD_INPUT
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    sys.exit(code)


def _let_the_first_rank_speak() -> None:
    """Wait where another rank here says the same: torchrun ends the others within a second."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(AFTER_THE_FIRST)
