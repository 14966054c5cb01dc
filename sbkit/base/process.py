"""End a command: handle its signals, print the message of an error, return the exit code."""

import errno
import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from sbkit.base.errors import (
    ASKED_TO_STOP,
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    PIPE_CLOSED,
    OtherRankError,
    SbkitError,
    StopRequestedError,
)
from sbkit.base.files import to_json
from sbkit.base.imports import explain_torchaudio
from sbkit.base.stores import is_temporary
from sbkit.base.threads_and_memory import SpinSwitch
from sbkit.base.user_folders import prepare_user

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# The other ranks print their errors this much later than the first rank, whose error counts. On a
# busy machine, the first rank failed more than 3 s after another one.
OTHER_RANKS_DELAY = 10.0  # seconds
SAVED_FILE = "SBKIT_SAVED_FILE"  # variable of a launcher: a file that each saved checkpoint touches
OS_ERROR_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room there"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Choose another or fix its rights"),
}
# torch raises a worker's error again with its traceback, whose last line is the error itself.
ERROR_OF_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
LOST_RANK = "gloo.*(Connection (?:reset|closed) by peer|Broken pipe)"
# Messages of torch and of the system: a pattern, the sentence for users and the exit code. In the
# sentence, {0} is the pattern's group and {1} the message. The first pattern that matches counts.
FAULTS = (
    (
        "(No usable temporary directory)",
        "There is no folder for temporary files. Set TMPDIR to a folder that can be written to.",
        BAD_INPUT,
    ),
    (
        "(Too many open files|received 0 items of ancdata)",
        "Too many files are open ({1}). Allow more (ulimit -n), or lower --num_workers.",
        BAD_INPUT,
    ),
    (
        r"DataLoader worker \(pid.*?\) (is killed by signal: [^.]+|exited unexp[^.]+)",
        "A worker that loads data {0}. If memory is short (Killed) or /dev/shm is full (Bus "
        "error), lower --num_workers, and rerun the same command to resume.",
        FAILED,
    ),
    (
        LOST_RANK,
        "Another process of this run has ended ({1}). Rerun the same command to resume from the "
        "last checkpoint.",
        FAILED,
    ),
    (
        "(MemoryError|Cannot allocate memory|can't allocate memory|can't start new thread"
        "|map segment|out of memory|Resource temporarily unavailable)",  # too many processes
        "The system refused memory or threads ({1}). Free some memory, or raise the limits "
        "(ulimit -v, ulimit -u), and rerun the same command.",
        BAD_INPUT,
    ),
)
# torchaudio was built for another CUDA; torch has no CUDA; torchaudio is missing.
TORCHAUDIO = re.compile("TorchAudio were compiled|/torchaudio/lib/|No module named 'torchaudio")


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and exit with its code; bad input and stop signals print one sentence."""
    # Imports make 450,000 objects that stay: scanning them took 0.9 of 5.8 s at the start.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    with drop_unwritable("stderr"):
        prepare_user()
        if isinstance(sys.stdout, TextIOWrapper):  # an ASCII terminal, or undecodable file names
            sys.stdout.reconfigure(errors="backslashreplace")
        code = _run_to_exit_code(main)
        _give_up_if_lost(sys.stdout)
    sys.exit(code)


def is_command() -> bool:
    """Return whether this process is a command of `run_main`, not a notebook or other program."""
    return any(frame.f_code is run_main.__code__ for frame, _ in traceback.walk_stack(None))


def _run_to_exit_code(main: Callable[[], int | None]) -> int:
    """Run a command, print its error if a user can fix it, and return its exit code."""
    try:
        with handle_signals(STOP_SIGNALS, _stop), SpinSwitch():
            code = main() or 0
            sys.stdout.flush()  # a closed pipe raises here instead of when Python ends
            return code
    except BrokenPipeError:
        return PIPE_CLOSED
    except (KeyboardInterrupt, OtherRankError) as error:
        if isinstance(error, StopRequestedError) and os.environ.get("RANK", "0") == "0":
            print(error, file=sys.stderr)
        return exit_code(error)
    except Exception as error:
        report_error(error)
        return exit_code(error)


def report_error(error: Exception, addition: str = "") -> None:
    """Print an error as one sentence if a user can fix it, else with its traceback."""
    user_error = as_user_error(error)
    if user_error is None:
        traceback.print_exception(error)
        if addition:
            print(addition, file=sys.stderr)
        return
    sentence = f"{user_error}{addition}"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # The first rank prints: torchrun ends all ranks within a second of the first exit.
        time.sleep(OTHER_RANKS_DELAY)
    print(sentence, file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints it below its own traceback
        details = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        record = {"message": sentence, "extraInfo": details}
        with suppress(OSError):  # its disk is full
            Path(file).write_text(to_json({"message": record}))


class _DroppingStream:
    """Write to a stream, and drop the text that it refuses."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # the latter if the stream is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


@contextmanager
def drop_unwritable(*names: str) -> Iterator[None]:
    """Drop text that a stream refuses inside the block, because a disk is full or a terminal lost.

    names: `stdout` or `stderr`, if it carries no result.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # a new file gets the lowest free descriptor: this one's
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    streams = {name: getattr(sys, name) for name in names}
    for name, stream in streams.items():
        setattr(sys, name, _DroppingStream(stream))
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)
            _give_up_if_lost(stream)


def _give_up_if_lost(stream: TextIO) -> None:
    """Connect a lost output to /dev/null; otherwise Python would fail to flush it, and exit 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        if stream in (sys.__stdout__, sys.__stderr__) and not stream.closed:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    match error:
        case StopRequestedError():
            return ASKED_TO_STOP
        case KeyboardInterrupt():
            return INTERRUPTED
        case SystemExit(code=int() | None as code):
            return code or 0
        case Exception() if not is_temporary(error) and (user_error := as_user_error(error)):
            return user_error.exit_code
    return FAILED


def as_user_error(error: Exception) -> SbkitError | None:
    """Return an explanation if a user can fix the error: input, files, memory, a lost rank."""
    text = error.message if isinstance(error, SbkitError) else str(error)
    is_from_worker = ERROR_OF_WORKER.search(text) is not None
    if is_from_worker:
        text = text.rstrip().splitlines()[-1]
    if isinstance(error, SbkitError):
        return SbkitError(text.partition(": ")[2]) if is_from_worker else error
    kind = type(error).__name__
    reason = text.partition("\n")[0][:200] or kind
    if isinstance(error, OSError) and error.filename is not None:
        text = error.strerror or ""  # without the name of the file
    for pattern, sentence, code in FAULTS:
        if match := re.search(pattern, f"{kind}: {text}"):
            user_error = SbkitError(sentence.format(match[1], reason))
            user_error.exit_code = code
            return user_error
    if isinstance(error, OSError) and (
        is_from_worker or error.filename is not None or error.errno in OS_ERROR_FIXES
    ):
        fix = OS_ERROR_FIXES.get(error.errno or 0, "Check it")
        return SbkitError(
            f"{error.filename or 'A file'} cannot be read or written ({error.strerror or reason}). "
            f"{fix}, and rerun the same command."
        )
    if TORCHAUDIO.search(text):  # speechbrain imports torchaudio
        return SbkitError(explain_torchaudio(error))
    return None


@contextmanager
def handle_signals(
    signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals inside the block, and restore their handlers afterwards.

    Outside the main thread nothing is handled, because Python forbids it. SIGHUP stays ignored if
    `nohup` made this process ignore it.
    """
    with ExitStack() as stack:
        for number in signals if threading.current_thread() is threading.main_thread() else ():
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                stack.callback(signal.signal, number, signal.signal(number, handler))
        yield


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Raise StopRequestedError, so that resources are closed before the command ends."""
    for other in STOP_SIGNALS:  # a second signal would interrupt the cleanup
        signal.signal(other, signal.SIG_IGN)
    raise StopRequestedError("Stopped outside of training; rerun the same command.")
