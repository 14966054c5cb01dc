"""Make the threads and the memory of a process fast: OpenMP's waiting and glibc's allocator.

OpenMP's threads spin between operations, or sleep while other processes need the cores. A spinning
thread is ready at once; a sleeping thread has to be woken. But spinning threads take the cores from
other processes that have work, and then from each other. RTFx of the default YAML on two cores, the
median of several rounds:

                                          idle machine       with a busy process
    GNU OpenMP's defaults                          151                        9
    OMP_WAIT_POLICY=active                         157                       10
    OMP_WAIT_POLICY=passive                         89                       88
    this module                                    157                       85

GNU OpenMP spins GOMP_SPINCOUNT times. While it has more threads than the machine has processors, it
spins by a throttled count instead, which OMP_WAIT_POLICY=passive makes zero (libgomp's env.c and
config/linux/wait.h). So if both are set, one more team of sleeping threads turns spinning off. No
value of GOMP_SPINCOUNT alone does it: 300 to 30,000 give 22 to 63 with a busy process.

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
import logging
import os
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from sbkit.base.machine import allowed_cores, usable_cores
from sbkit.base.messages import note_once

# ---- OpenMP's threads

OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000000"}  # about 50 ms awake
CHECK_SECONDS = 0.25
BUSY_SHARE = 0.1  # of the threads' time, waiting for a core; an idle machine has 0.01 to 0.04
QUIET_CHECKS = 8  # in a row, before threads spin again
LIBRARY_PATHS = ("/torch/lib/libgomp", "/torch.libs/libgomp")  # sentencepiece has its own libgomp


def prepare_waiting() -> bool:
    """Set up OpenMP before it is loaded; return whether `SpinSwitch` decides how it waits."""
    if usable_cores() < allowed_cores():  # by a container's quota, which OpenMP ignores
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    settings = {name: os.environ[name] for name in OPENMP_SETTINGS if name in os.environ}
    is_set_by_user = settings not in ({}, OPENMP_SETTINGS)  # or set by a parent process
    has_one_thread = os.environ.get("OMP_NUM_THREADS") == "1"
    if is_set_by_user or has_one_thread or seconds_without_core() is None:
        return False
    os.environ.update(OPENMP_SETTINGS)
    return True


def seconds_without_core() -> float | None:
    """Return the seconds that threads of this process were ready to run and had no core.

    None if the system does not report it. Ended threads are not counted.
    """
    total = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                total += int((task / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return total / 1e9


class SpinSwitch:
    """Switch spinning off and on while a command runs, as other processes need the cores."""

    def __init__(self) -> None:
        self._quiet_checks = 0
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._end_of_team: threading.Event | None = None

    def __enter__(self) -> "SpinSwitch":
        if prepare_waiting():
            watcher = threading.Thread(target=self._watch, daemon=True)
            with suppress(RuntimeError):  # no thread can be started
                watcher.start()
                self._watcher = watcher
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        self.spin()

    def sleep(self) -> None:
        """Start a second team of threads, which sleeps; do nothing if OpenMP is not loaded."""
        library = loaded_library()
        if self._end_of_team is None and library is not None:
            if not can_start_threads(allowed_cores() + 2):  # OpenMP would end the process
                note = "note: OpenMP's threads spin while they wait: the system refuses others."
                note_once(note, level=logging.WARNING)
                self._stop.set()
                return
            self._end_of_team, ready = threading.Event(), threading.Event()
            arguments = (library, self._end_of_team, ready)
            threading.Thread(target=_hold_team, args=arguments, daemon=True).start()
            ready.wait()

    def spin(self) -> None:
        """End the second team."""
        if self._end_of_team is not None:
            self._end_of_team.set()
            self._end_of_team = None

    def decide(self, share: float) -> None:
        """Sleep or spin, given the share of time that threads spent waiting for a core."""
        self._quiet_checks = 0 if share > BUSY_SHARE else self._quiet_checks + 1
        if self._quiet_checks == 0:
            self.sleep()  # at every busy check: OpenMP may not have been loaded at the last one
        elif self._quiet_checks >= QUIET_CHECKS:
            self.spin()

    def _watch(self) -> None:
        waited_before = seconds_without_core() or 0.0
        since = time.perf_counter()
        while not self._stop.wait(CHECK_SECONDS):
            waited = seconds_without_core() or waited_before
            now = time.perf_counter()
            self.decide((waited - waited_before) / (now - since))
            waited_before = waited
            since = now


def loaded_library() -> ctypes.CDLL | None:
    """Return torch's GNU OpenMP library, or None if it is not loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if any(path in line for path in LIBRARY_PATHS):
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    return None


def can_start_threads(count: int) -> bool:
    """Return whether the system allows so many further threads."""
    end = threading.Event()
    threads: list[threading.Thread] = []
    try:
        while len(threads) < count:
            thread = threading.Thread(target=end.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        return False
    finally:
        end.set()
        for thread in threads:
            thread.join()
    return True


def _hold_team(library: ctypes.CDLL, end: threading.Event, ready: threading.Event) -> None:
    """Start one OpenMP thread more than there are processors, until `end` is set."""
    num_threads = allowed_cores() + 1
    function = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # harmless in every thread
    library.GOMP_parallel(function, None, num_threads, 0)
    ready.set()
    end.wait()


# ---- glibc's allocator

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
