"""Control what glibc's allocator does with freed memory.

By default glibc maps each large tensor separately and returns free memory at the end of its heap to
the system, so every step maps and zeroes the same buffers again. `keep_freed_memory` keeps freed
memory in the process; only the part of the heap in use takes memory. The joint model of
`tools/bench_train` on two cores, in alternating rounds:

                           RTFx    page faults per step    peak memory
    glibc's defaults        214                    2091        1.55 GB
    freed memory kept       233                     506        1.55 GB
    and large pages         238                      73        1.58 GB
"""

import ctypes
import os
from contextlib import suppress
from functools import cache

# Options of mallopt(3) and madvise(2); sizes are in bytes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MADV_HUGEPAGE = 14
LARGE_PAGE_BYTES = 2 << 20
FIRST_HEAP_BYTES = 1 << 30  # the heap grows by this at first, and then by HEAP_STEP_BYTES
HEAP_STEP_BYTES = 64 << 20
MAX_HEAP_TENSOR_BYTES = 32 << 20  # glibc maps larger tensors in any case
# The environment variables that choose glibc's options or another allocator.
ALLOCATOR_VARIABLES = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"),
    *("GLIBC_TUNABLES", "LD_PRELOAD"),
)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, unless the user has set one of `ALLOCATOR_VARIABLES`."""
    options = (
        (M_MMAP_THRESHOLD, MAX_HEAP_TENSOR_BYTES),
        (M_TRIM_THRESHOLD, 2**31 - 1),
        (M_TOP_PAD, FIRST_HEAP_BYTES),
    )
    with suppress(AttributeError, OSError):  # no glibc
        glibc = _glibc()
        if os.environ.keys().isdisjoint(ALLOCATOR_VARIABLES) and all(
            glibc.mallopt(*option) for option in options
        ):
            _grow_in_large_pages(glibc)
            glibc.mallopt(M_TOP_PAD, HEAP_STEP_BYTES)


def share_free_memory() -> None:
    """Let many threads share two heaps of glibc, instead of eight per core.

    With 64 clients on two cores, `sbkit serve` grew by 96 MB in a minute, and with two by 12 MB.
    """
    with suppress(AttributeError, OSError):
        _glibc().mallopt(M_ARENA_MAX, 2)


def return_freed_memory() -> None:
    """Make glibc return the free memory that it keeps to the system."""
    with suppress(AttributeError, OSError):
        _glibc().malloc_trim(0)


def _grow_in_large_pages(glibc: ctypes.CDLL) -> None:
    """Make the heap grow now, and request large pages for the new part."""
    glibc.sbrk.restype = glibc.malloc.restype = ctypes.c_void_p
    start = glibc.sbrk(ctypes.c_ssize_t(0))
    glibc.free(ctypes.c_void_p(glibc.malloc(ctypes.c_size_t(MAX_HEAP_TENSOR_BYTES // 2))))
    end = glibc.sbrk(ctypes.c_ssize_t(0))
    first_page = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    if first_page < end:
        size = ctypes.c_size_t(end - first_page)
        glibc.madvise(ctypes.c_void_p(first_page), size, MADV_HUGEPAGE)  # may be refused


@cache
def _glibc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
