"""Imitate a full disk by a limit on file sizes, and other users' files by their modes.

Calls of the system that start processes and threads may be refused.
"""

import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

NO_PROCESS = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
NO_THREAD = RuntimeError("can't start new thread")
# Without /dev/shm, where it is read-only, full or another user's, and without semaphores
SEMAPHORE_ERRORS = [
    OSError(code, os.strerror(code))
    for code in (errno.ENOENT, errno.EROFS, errno.ENOSPC, errno.EACCES, errno.ENOSYS)
]
LOKY_REFUSALS = [  # a call, its error, and how many calls succeed before
    *(("loky.ProcessPoolExecutor.__init__", error, 0) for error in SEMAPHORE_ERRORS),
    ("loky.ProcessPoolExecutor", ImportError("no sem_open"), 0),
    ("loky.ProcessPoolExecutor.submit", NO_PROCESS, 0),
    ("loky.process_executor._ExecutorManagerThread.start", NO_THREAD, 0),
]
TORCH_REFUSALS = [
    *(("multiprocessing.synchronize.SemLock.__init__", error, 0) for error in SEMAPHORE_ERRORS),
    *(("os.fork", NO_PROCESS, after) for after in (0, 1)),
    ("multiprocessing.util.get_temp_dir", SEMAPHORE_ERRORS[0], 0),
    ("tempfile.mktemp", OSError("AF_UNIX path too long"), 0),
]


@contextmanager
def refusing(call: str, error: Exception, *, after: int = 0) -> Iterator[None]:
    """Let calls of a function raise an error, except for the first ones."""
    original, calls = resolve_name(call), 0

    def refuse(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return original(*arguments, **options)

    with patch(call, refuse), patch("sbkit.base.messages.logged_notes", set()):
        yield


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def obeying_modes() -> Iterator[None]:
    """Be refused what the modes of files forbid, even as root."""
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the call, and this thread
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    limited = (ctypes.c_uint32 * 6)(*before)
    limited[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, limited) == 0
    try:
        yield
    finally:
        libc.capset(header, before)
