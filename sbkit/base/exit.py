"""How a command leaves: with a code that says why, and a sentence where a user can fix it."""

import errno
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType
from typing import Any, NoReturn

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, FAILED, INTERRUPTED, PIPE_CLOSED, SbkitError
from sbkit.base.thread_waiting import ThreadWaiting

Handler = Callable[[int, FrameType | None], Any]

AFTER_THE_FIRST = 10.0  # seconds; beside busy processes one rank was more than 3 s late
ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
FIXES = {  # what the operating system says of a place, and what to do about it
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room there"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Choose another or fix its rights"),
    errno.ENAMETOOLONG: "Shorten its name",
    **dict.fromkeys(
        (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP), "Move away what stands there"
    ),
    **dict.fromkeys((errno.ENOENT, errno.ESTALE), "Put back what was moved or removed"),
    **dict.fromkeys((errno.EIO, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT), "Check its disk"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Allow more open files (ulimit -n)"),
}
LOST = re.compile("gloo.*(Connection (reset|closed) by peer|Broken pipe)")
SHORTAGE = ("can't allocate memory", "can't start new thread", "map segment", "out of memory")


class AskedToStop(SystemExit):
    """Leave at once: a signal asks for it while nothing is trained that would have to be saved."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and leave with its exit code.

    Bad input leaves a sentence, not a traceback; so do SIGTERM, SIGUSR1 and SIGHUP, which
    `Brain.fit` takes over while it trains.
    """
    asked: list[int] = []
    if isinstance(sys.stdout, TextIOWrapper):  # a name of other bytes, a terminal without letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with leaving_when_asked(asked), ThreadWaiting():
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
        if asked:  # libraries swallow signals while they are imported, and fail then
            code = asked[0]
        elif (sentence := _sentence_of(error)) is not None:
            code = _refuse(sentence)
        elif LOST.search(str(error)):
            code = _refuse(_of_a_rank(error)) and FAILED
        else:
            raise
    sys.exit(code)


def _refuse(error: SbkitError) -> int:
    _let_the_first_rank_speak()
    with suppress(OSError):  # where nothing can be printed, the exit code says it
        print(error, file=sys.stderr, flush=True)
    return BAD_INPUT


def _sentence_of(error: Exception) -> SbkitError | None:
    """Make a sentence of what a user can mend: a place on the disk, too little memory or threads.

    None for any other error.
    """
    if isinstance(error, OSError) and error.errno in FIXES:
        return SbkitError(
            f"{error.filename or 'A file'} must be a place to read and write, but is not "
            f"({error.strerror}). {FIXES[error.errno]}, and give the same command again."
        )
    if isinstance(error, OSError):
        is_shortage = error.errno in (errno.ENOMEM, errno.EAGAIN)
    else:  # Python has several for it
        is_shortage = isinstance(error, MemoryError) or any(map(str(error).__contains__, SHORTAGE))
    if not is_shortage:
        return None
    what = str(error).partition("\n")[0][:200] or type(error).__name__
    return SbkitError(
        f"Memory and threads must suffice for this command, but the system refused some ({what}). "
        "Free memory, a GPU's where it is CUDA's, or raise the limits (ulimit -v, ulimit -u), and "
        "give the same command again."
    )


def _of_a_rank(error: Exception) -> SbkitError:
    what = str(error).partition("\n")[0][-100:]
    return SbkitError(
        f"All processes of a run must live as long as it does, but another one ended ({what}). The "
        "same command goes on from the last checkpoint."
    )


def exit_code(error: BaseException) -> int:
    """Return the code that a command leaves with over an error."""
    match error:
        case SbkitError():
            return BAD_INPUT
        case Exception() if _sentence_of(error) is not None:
            return BAD_INPUT
        case KeyboardInterrupt():
            return INTERRUPTED
        case SystemExit(code=int() | None as code):
            return code or 0
    return FAILED


@contextmanager
def leaving_when_asked(asked: list[int]) -> Iterator[None]:
    """Turn SIGTERM, SIGUSR1 and SIGHUP into AskedToStop: what is open is closed on the way out.

    asked: is given the exit code of each signal that came, of Ctrl-C, too.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        asked.append(ASKED_TO_STOP)
        _leave(number, frame)

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        asked.append(INTERRUPTED)
        raise KeyboardInterrupt

    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with handling(ASKING, leave), handling([signal.SIGINT] * is_default, interrupt):
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
    """Print to /dev/null once the terminal is gone: writing to it would end the process."""
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
    for each in ASKING:  # a second one would interrupt the cleaning up
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGHUP:
        leave_terminal()
    raise AskedToStop(ASKED_TO_STOP)


def _let_the_first_rank_speak() -> None:
    """Wait on other local ranks while the first says why: torchrun ends them within a second."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(AFTER_THE_FIRST)
