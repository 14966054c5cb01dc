"""Imitate a full disk by a limit on file sizes, and other users' files by their modes."""

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager


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
