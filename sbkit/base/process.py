"""A command: its options and optional packages, its signals, and the code that it leaves with."""

import argparse
import errno
import gc
import logging
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT, FAILED, INTERRUPTED, PIPE_CLOSED, SbkitError
from sbkit.base.files import read_regular, to_json
from sbkit.base.machine import ThreadWaiting

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any]

LARGEST_SOURCE = 1 << 24  # bytes of a module
AFTER_THE_FIRST = 10.0  # seconds; beside busy processes one rank was more than 3 s late
ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
FIXES = {  # what the operating system says of a file, and what to do about it
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room there"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Choose another or fix its rights"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Allow more open files (ulimit -n)"),
}
LOST = re.compile("gloo.*(Connection (reset|closed) by peer|Broken pipe)")
SHORTAGE = (
    *("Cannot allocate memory", "can't allocate memory", "can't start new thread"),
    *("map segment", "out of memory"),
)


class AskedToStop(SystemExit):
    """Leave at once: a signal asks for it while nothing is trained that would have to be saved."""


class Parser(argparse.ArgumentParser):
    """Take an option's name with `_` for `-`, too, as keys of a YAML have it: --report_by."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments of this command; those of a subcommand come to its own parser."""
        return super().parse_known_args([*map(self._spell, args)], namespace)

    def _spell(self, argument: str) -> str:
        name, *value = argument.split("=", 1)
        spelled = name.replace("_", "-")
        return "=".join([spelled, *value]) if spelled in self._option_string_actions else argument


def require_package(name: str, *, extra: str) -> Any:
    """Import a package of an extra; raises SbkitError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SbkitError(
            f"The package {name.partition('.')[0].replace('_', '-')} must be installed for this, "
            f"but cannot be imported ({error}). Install it: pip install 'sbkit[{extra}]'"
        ) from error


def import_user_modules(names: Collection[str], bundle: Path | None = None) -> frozenset[str]:
    """Import the modules that `--import` names; the working folder, then a bundle, come last.

    Beside these nothing is ever imported because a file names it. What is run
    is logged. Return the names; raises SbkitError for a module that cannot be
    imported.
    """
    if names and str(Path.cwd()) not in sys.path:  # the installed command does not look there
        sys.path.append(str(Path.cwd()))
    for name in names:
        try:
            _import_user_module(name, None if bundle is None else bundle / f"{name}.py")
        except Exception as error:  # a module of the user's may fail in any way
            raise SbkitError(
                f"--import must name a module that can be imported, but `{name}` raised "
                f"{type(error).__name__} ({error}). Start in the folder of {name}.py, or put it on "
                "PYTHONPATH."
            ) from error
    return frozenset(names)


def _import_user_module(name: str, beside: Path | None) -> None:
    """Import a module, or else run the source that lies in a bundle by its name."""
    if name in sys.modules:
        return
    try:
        spec = find_spec(name)  # which imports the packages of a dotted name
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # what a package imports is missing
            raise
        spec = None
    if spec is not None or beside is None or not beside.exists():
        if spec is not None:
            logger.info(f"--import {name}: running {spec.origin}")
        import_module(name)
        return
    source = read_regular(beside, largest=LARGEST_SOURCE, what="A module")
    logger.info(f"--import {name}: running {beside}")
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(beside)
    try:
        exec(compile(source, str(beside), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and leave with its exit code.

    Bad input leaves a sentence, not a traceback; so do SIGTERM, SIGUSR1 and SIGHUP, which
    `Brain.fit` handles itself while it trains.
    """
    # Imports make 450,000 objects that stay: looking through them took 0.9 of 5.8 s at the start.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal without letters, a name of other bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with handling(ASKING, _leave), ThreadWaiting():
            code = main() or 0
            sys.stdout.flush()  # raises here where the reader has left, not at Python's end
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
        sentence = _sentence_of(error)
        if sentence is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The first rank says it: torchrun ends all within a second of the first that ends.
            time.sleep(AFTER_THE_FIRST)
        print(sentence, file=sys.stderr, flush=True)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            _tell_torchrun(str(sentence), Path(file))
        code = exit_code(error)
    sys.exit(code)


def _tell_torchrun(sentence: str, file: Path) -> None:
    """Write what torchrun reports last, below the traceback of its own that it ends with."""
    shown = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    file.write_text(to_json({"message": {"message": sentence, "extraInfo": shown}}))


def exit_code(error: BaseException) -> int:
    """Return the code that a command leaves with over an error."""
    match error:
        case Exception() if LOST.search(str(error)):
            return FAILED
        case Exception() if _sentence_of(error) is not None:
            return BAD_INPUT
        case KeyboardInterrupt():
            return INTERRUPTED
        case SystemExit(code=int() | None as code):
            return code or 0
    return FAILED


def _sentence_of(error: Exception) -> SbkitError | None:
    """Describe an error that a user can fix: input, a file, memory, a lost rank; else None."""
    what = str(error).partition("\n")[0][:200] or type(error).__name__
    if isinstance(error, SbkitError):
        return error
    if isinstance(error, OSError) and (error.filename is not None or error.errno in FIXES):
        return SbkitError(
            f"{error.filename or 'A file'} must be a place to read and write, but is not "
            f"({error.strerror}). {FIXES.get(error.errno or 0, 'Check it')}, and give the same "
            "command again."
        )
    if LOST.search(str(error)):
        return SbkitError(
            "All processes of a run must live as long as it does, but another one ended "
            f"({what[-100:]}). The same command continues from the last checkpoint."
        )
    if isinstance(error, MemoryError) or any(map(str(error).__contains__, SHORTAGE)):
        return SbkitError(
            f"Memory and threads must suffice for this command, but the system refused some "
            f"({what}). Free memory, a GPU's where it is CUDA's, or raise the limits (ulimit -v, "
            "ulimit -u), and give the same command again."
        )
    return None


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
        if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Raise AskedToStop: what is open is closed on the way out."""
    for each in ASKING:  # a second one would interrupt the cleaning up
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGHUP:
        leave_terminal()
    raise AskedToStop(ASKED_TO_STOP)
