"""Memory that an operation frees stays with the process, in large pages.

glibc maps large tensors one by one and gives free memory at the end of its heap back to the system,
so the same buffers are mapped and zeroed again, page by page, in every step. Here the heap grows by
a gigabyte at once, of which only what is used takes memory, is asked for in pages of 2 MB where the
system has them (transparent huge pages), and is kept. Seconds of audio per second of the joint
model on two cores, page faults in a step, and the peak of memory (`tools/bench_train` has the
model; alternating rounds, November 2026):

    glibc as it comes     214    2091    1.55 GB
    kept                  233     506    1.55 GB
    in large pages too    238      73    1.58 GB
"""

import ctypes
import os
from contextlib import suppress
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
MADV_HUGEPAGE = 14
LARGE_PAGE = 2 << 20
HEAP = 1 << 30  # bytes that the heap grows by at first, and AT_ONCE later
AT_ONCE = 64 << 20
LARGEST = 32 << 20  # a tensor; glibc maps what is larger in any case
VARIABLES = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"),
    *("GLIBC_TUNABLES", "LD_PRELOAD"),
)


_is_kept = False


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory; return whether it does.

    It does not where one of VARIABLES is set, or where there is no glibc.
    """
    global _is_kept
    _is_kept = not _given() and _set_up()
    return _is_kept


def describe_allocator() -> str:
    """Write for the log what becomes of memory that is freed."""
    if _is_kept:
        return "freed memory is kept"
    return f"memory is allocated as {' and '.join(_given()) or 'the system'} has it"


def _given() -> list[str]:
    return [name for name in VARIABLES if name in os.environ]


def _set_up() -> bool:
    try:
        glibc = _glibc()
        options = ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, HEAP))
        if not all(glibc.mallopt(option, value) for option, value in options):
            return False
        _grow_in_large_pages(glibc)
        return bool(glibc.mallopt(M_TOP_PAD, AT_ONCE))
    except (AttributeError, OSError, TypeError):
        return False


def _grow_in_large_pages(glibc: Any) -> None:
    """Make the heap grow now, and ask for large pages in what it grew by."""
    glibc.sbrk.restype = glibc.malloc.restype = ctypes.c_void_p
    start = glibc.sbrk(ctypes.c_ssize_t(0))
    glibc.free(ctypes.c_void_p(glibc.malloc(ctypes.c_size_t(LARGEST // 2))))
    end = glibc.sbrk(ctypes.c_ssize_t(0))
    first = -(-start // LARGE_PAGE) * LARGE_PAGE
    if first < end:
        size = ctypes.c_size_t(end - first)
        glibc.madvise(ctypes.c_void_p(first), size, MADV_HUGEPAGE)  # no harm where it is refused


def return_freed_memory() -> None:
    """Return free memory to the system, where there is glibc, which keeps some of it."""
    with suppress(AttributeError, OSError, TypeError):
        _glibc().malloc_trim(0)


@cache
def _glibc() -> Any:
    return ctypes.CDLL(None)
