"""How a command leaves: with a code that says why, and a sentence where a user can fix it."""

import errno
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import Any, NoReturn

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, FAILED, INTERRUPTED, PIPE_CLOSED, SbkitError
from sbkit.base.thread_waiting import ThreadWaiting

Handler = Callable[[int, FrameType | None], Any]

AFTER_THE_FIRST = 10.0  # seconds; beside busy processes one rank was more than 3 s late
ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
MENDS = {  # what the operating system says of a place, and what to do about it
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room there"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Choose another or fix its rights"),
    errno.ENAMETOOLONG: "Shorten its name",
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "Move away what stands there"),
}


class AskedToStop(SystemExit):
    """Leave at once: a signal asks for it while nothing is trained that would have to be saved."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and leave with its exit code.

    Bad input leaves a sentence, not a traceback; so do SIGTERM, SIGUSR1 and SIGHUP, which
    `Brain.fit` takes over while it trains.
    """
    interrupted = threading.Event()
    if isinstance(sys.stdout, TextIOWrapper):  # a name of other bytes, a terminal without letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with leaving_when_asked(interrupted), ThreadWaiting():
            code = main() or 0
            sys.stdout.flush()  # a reader that has left is noticed here, not at Python's end
    except SbkitError as error:
        code = _refuse(error)
    except AskedToStop:
        if os.environ.get("RANK", "0") == "0":
            print(
                "Asked to stop outside of training; the same command starts again.", file=sys.stderr
            )
        code = ASKED_TO_STOP
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    except Exception as error:
        if interrupted.is_set():  # libraries swallow Ctrl-C while they are imported, and fail then
            code = INTERRUPTED
        elif isinstance(error, OSError) and error.errno in MENDS:
            code = _refuse(_of_a_place(error))
        else:
            raise
    sys.exit(code)


def _refuse(error: SbkitError) -> int:
    _let_the_first_rank_speak()
    print(error, file=sys.stderr)
    return BAD_INPUT


def _of_a_place(error: OSError) -> SbkitError:
    """Make a sentence of a full disk, a read-only folder, or a file where a folder must be."""
    return SbkitError(
        f"{error.filename or 'A file'} must be a place to read and write, but is not "
        f"({error.strerror}). {MENDS[error.errno or 0]}, and give the same command again."
    )


def exit_code(error: BaseException) -> int:
    """Return the code that a command leaves with over an error."""
    match error:
        case SbkitError():
            return BAD_INPUT
        case OSError(errno=number) if number in MENDS:
            return BAD_INPUT
        case KeyboardInterrupt():
            return INTERRUPTED
        case SystemExit(code=int() | None as code):
            return code or 0
    return FAILED


@contextmanager
def leaving_when_asked(interrupted: threading.Event) -> Iterator[None]:
    """Turn SIGTERM, SIGUSR1 and SIGHUP into AskedToStop: what is open is closed on the way out.

    ``interrupted`` is set by Ctrl-C.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with handling(ASKING, _leave), handling([signal.SIGINT] * is_default, interrupt):
        yield


@contextmanager
def handling(signals: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Handle signals, and leave them afterwards to what had them before.

    Does nothing outside the main thread, where Python has no signals, nor with SIGHUP where `nohup`
    made this process ignore it.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for each in signals:
            if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN:
                before[each] = signal.signal(each, handler)
    try:
        yield
    finally:
        for each, earlier in before.items():
            signal.signal(each, earlier)


def leave_terminal() -> None:
    """Print to nowhere once the terminal is gone; any word to it would end the process."""
    for stream in (1, 2):
        try:
            is_device = stat.S_ISCHR(os.fstat(stream).st_mode)
        except OSError:  # closed
            continue
        if is_device and not os.isatty(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    for each in ASKING:  # once is enough: asked again, it would be torn out of its cleaning up
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGHUP:
        leave_terminal()
    raise AskedToStop(ASKED_TO_STOP)


def _let_the_first_rank_speak() -> None:
    """Wait where another rank here says the same: torchrun ends the others within a second."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(AFTER_THE_FIRST)
