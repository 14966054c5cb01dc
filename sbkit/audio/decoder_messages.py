"""What the C libraries that decode audio print on standard error, with the file's name before it.

libmpg123 tells what it skips in a damaged mp3 file, and knows no name. It writes to what glibc's
variable `stderr` points at: here a stream whose lines come back to Python, in the thread that
decodes. Lines of other libraries pass unchanged. Elsewhere than on glibc nothing is done.
"""

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from sbkit.base.text import printable

LINE_BUFFERED = 1  # _IOLBF of stdio.h
LONGEST = 4096  # bytes of a line
DROPPED = object()
_reading = threading.local()  # name: of the file that this thread decodes

_Write: Any = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t
)


class _Functions(ctypes.Structure):
    """The functions of a stream, `cookie_io_functions_t` of stdio.h."""

    _fields_ = (
        ("read", ctypes.c_void_p),
        ("write", _Write),
        ("seek", ctypes.c_void_p),
        ("close", ctypes.c_void_p),
    )


@contextmanager
def named_messages(file: Path | None) -> Iterator[None]:
    """Put a file's name before what is printed while this thread decodes it; None: drop that."""
    _redirect()
    before = getattr(_reading, "name", None)
    _reading.name = file or DROPPED
    try:
        yield
    finally:
        _reading.name = before


@cache
def _redirect() -> Any:
    """Let `stderr` of C be a stream of `_write`, to the end of the process."""
    try:
        glibc = ctypes.CDLL(None)
        make, pointer = glibc.fopencookie, ctypes.c_void_p.in_dll(glibc, "stderr")
    except (AttributeError, OSError, TypeError, ValueError):
        return None
    functions = _Functions(None, _Write(_write), None, None)
    make.restype, make.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p, _Functions)
    stream = make(None, b"w", functions)
    glibc.setvbuf.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    if stream is None or glibc.setvbuf(stream, None, LINE_BUFFERED, LONGEST):
        return None
    atexit.register(setattr, pointer, "value", pointer.value)  # Python ends before C does
    pointer.value = stream
    return functions  # kept by the cache for as long as C may call them


def _write(cookie: object, start: Any, size: int) -> int:
    content, name = start[:size], getattr(_reading, "name", None)
    if name is None:
        os.write(2, content)
    elif name is not DROPPED:
        line = content.decode(errors="replace").rstrip("\n")
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stderr.write(printable(f"{name}: {line}") + "\n")  # at once, unlike print
    return size
