"""The machine as this process may use it: cores, memory, the allocator, and how threads wait.

Threads of an operation wait for the next one: awake while nobody else needs the cores. A thread
that spins is ready at once, one that sleeps has to be woken; but spinning threads take the cores
from whoever else has work, and then from each other. Seconds of audio per second of the default
YAML on two cores, alone and beside a busy process (median of rounds, November 2026):

    GNU OpenMP as it comes                   151      9
    OMP_WAIT_POLICY=active                   157     10
    OMP_WAIT_POLICY=passive                   89     88
    this module                              157     85

GNU OpenMP spins GOMP_SPINCOUNT times, or as often as its throttled count says while it has more
threads than the machine has processors; with OMP_WAIT_POLICY=passive the throttled count is zero
(libgomp's env.c and config/linux/wait.h). So with both set, one more team of threads, asleep,
turns spinning off, and its end turns it on again. Results do not change: the work is cut alike.

Memory that an operation frees stays with the process, in large pages. glibc maps large tensors one
by one and gives free memory at the end of its heap back to the system, so the same buffers are
mapped and zeroed again, page by page, in every step. Here the heap grows by a gigabyte at once, of
which only what is used takes memory, in pages of 2 MB where the system has them, and is kept.
Seconds of audio per second of the joint model on two cores, page faults in a step, and the peak of
memory (`tools/bench_train` has the model; alternating rounds, November 2026):

    glibc as it comes     214    2091    1.55 GB
    kept                  233     506    1.55 GB
    in large pages too    238      73    1.58 GB
"""

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

PRECISIONS = {"torch": ("fp32", "bf16", "fp16"), "onnx": ("fp32", "int8")}  # of each runtime
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")

# Of the allocator: options of mallopt(3) and madvise(2), sizes in bytes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MADV_HUGEPAGE = 14
LARGE_PAGE = 2 << 20
HEAP = 1 << 30  # the heap grows by it at first, and by AT_ONCE later
AT_ONCE = 64 << 20
LARGEST = 32 << 20  # of a tensor; glibc maps what is larger in any case
VARIABLES = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"),
    *("GLIBC_TUNABLES", "LD_PRELOAD"),
)

# Of threads that wait.
SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000000"}  # about 50 ms awake
EVERY = 0.25  # seconds between two looks at who needs the cores
BUSY = 0.1  # share of the time that threads here waited for a core; it is 0.01 to 0.04 alone
QUIET_LOOKS = 8  # in a row, before threads spin again
LIBRARY = ("/torch/lib/libgomp", "/torch.libs/libgomp")  # sentencepiece brings one of its own


def usable_cores() -> int:
    """Count the cores that affinity and the quota of version 2 cgroups leave, at least one.

    `os.cpu_count()` counts those of the machine: of a job with 2 of 128 cores it says 128.
    """
    limits = (file.read_text().split() for file in _of_cgroups("cpu.max"))  # in microseconds
    quotas = [int(quota) // int(period) for quota, period in limits if quota != "max"]
    return max(1, min([affine_cores(), *quotas]))


def affine_cores() -> int:
    """Count the cores that this process may be scheduled on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # no Linux
        return os.cpu_count() or 1


def available_memory() -> int:
    """Count the bytes that this process may still take; as many as there can be without /proc."""
    limits = (file.read_text().strip() for file in _of_cgroups("memory.max"))
    found = [int(limit) for limit in limits if limit != "max"]
    if MEMORY.exists():
        free = re.search(r"^MemAvailable: +(\d+) kB$", MEMORY.read_text(), re.MULTILINE)
        found += [1024 * int(free[1])] if free else []
    return min(found, default=sys.maxsize)


def _of_cgroups(name: str) -> Iterator[Path]:
    """Yield the files of a name of this process's version 2 cgroup, and of all above it.

    Inside a container its own group is the root.
    """
    membership = MEMBERSHIP.read_text() if MEMBERSHIP.exists() else ""
    if inner := re.search(r"^0::/(.*)$", membership, re.MULTILINE):
        group = CGROUPS / inner[1]
        yield from filter(Path.exists, (each / name for each in (group, *group.parents)))


_is_kept = False


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, where there is glibc and none of VARIABLES is set."""
    global _is_kept
    with suppress(AttributeError, OSError):
        options = ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, HEAP))
        if not _is_set(VARIABLES) and all(_glibc().mallopt(*option) for option in options):
            _grow_in_large_pages(_glibc())
            _is_kept = bool(_glibc().mallopt(M_TOP_PAD, AT_ONCE))


def share_free_memory() -> None:
    """Let many threads use each other's free memory, where there is glibc.

    It gives them up to eight heaps a core. `sbkit serve` grew by 96 MB in a minute of 64 clients,
    and with two heaps by 12 MB (tools/bench_serve --soak, two cores, November 2026).
    """
    with suppress(AttributeError, OSError):
        _glibc().mallopt(M_ARENA_MAX, 2)


def return_freed_memory() -> None:
    """Return free memory to the system, where there is glibc, which keeps some of it."""
    with suppress(AttributeError, OSError):
        _glibc().malloc_trim(0)


def describe_allocator() -> str:
    """Write for the log what becomes of memory that is freed."""
    if _is_kept:
        return "freed memory is kept"
    return f"memory is allocated as {' and '.join(_is_set(VARIABLES)) or 'the system'} has it"


def _is_set(variables: Sequence[str]) -> list[str]:
    return [name for name in variables if name in os.environ]


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


@cache
def _glibc() -> Any:
    return ctypes.CDLL(None)


def prepare_waiting() -> bool:
    """Set up OpenMP, before anything loads it; return whether this module decides how it waits.

    OpenMP starts a thread for each core of the affinity. Where a container's quota allows fewer,
    OMP_NUM_THREADS is set to that: more threads would use up each other's time.

    This module does not decide where the user has set one of SETTINGS, where one thread does all
    the work, and where the system does not tell how long threads wait for a core.
    """
    if usable_cores() < affine_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    # SETTINGS are what a parent of this process has set here.
    if _openmp_settings() not in ({}, SETTINGS) or os.environ.get("OMP_NUM_THREADS") == "1":
        return False
    if waited_for_cores() is None:
        return False
    os.environ.update(SETTINGS)
    return True


def describe_waiting(count: int) -> str:
    """Write for the log how ``count`` threads wait between two operations."""
    if count == 1:
        return "one thread"
    settings = _openmp_settings()
    if settings == SETTINGS:
        return f"{count} threads, which sleep between operations while others need the cores"
    written = " ".join(f"{name}={value}" for name, value in settings.items())
    return f"{count} threads, which wait as {written or 'OpenMP does by itself'}"


def _openmp_settings() -> dict[str, str]:
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def waited_for_cores() -> float | None:
    """Return for how many seconds threads of this process were ready to run and had no core.

    None where the system does not tell. A thread that has ended is not counted any more.
    """
    total = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                total += int((task / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return total / 1e9


class ThreadWaiting:
    """Watch who needs the cores while a command runs, and switch spinning off and on."""

    def __init__(self) -> None:
        self._quiet = 0
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None
        self._team: threading.Event | None = None  # which ends the second team

    def __enter__(self) -> "ThreadWaiting":
        """Begin to watch, where this module decides."""
        if prepare_waiting():
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        if self._thread is not None:
            self._thread.join()
        self.spin()

    def sleep(self) -> None:
        """Start a second team of threads, which sleeps; nothing where no OpenMP is loaded yet."""
        library = loaded_library()
        if self._team is None and library is not None:
            self._team, ready = threading.Event(), threading.Event()
            arguments = (library, self._team, ready)
            threading.Thread(target=_hold_team, args=arguments, daemon=True).start()
            ready.wait()

    def spin(self) -> None:
        """End the second team."""
        if self._team is not None:
            self._team.set()
            self._team = None

    def decide(self, share: float) -> None:
        """Switch by the share of the time in which threads waited for a core."""
        self._quiet = 0 if share > BUSY else self._quiet + 1
        if self._quiet == 0:
            self.sleep()  # again and again: OpenMP may not have been loaded before
        elif self._quiet >= QUIET_LOOKS:
            self.spin()

    def _watch(self) -> None:
        before, since = waited_for_cores() or 0.0, time.perf_counter()
        while not self._leave.wait(EVERY):
            waited, now = waited_for_cores() or before, time.perf_counter()
            self.decide((waited - before) / (now - since))
            before, since = waited, now


def loaded_library() -> ctypes.CDLL | None:
    """Open torch's OpenMP, where it is loaded and GNU's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if any(each in line for each in LIBRARY):
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    return None


def _hold_team(library: ctypes.CDLL, leave: threading.Event, ready: threading.Event) -> None:
    """Start one thread more than OpenMP may use processors; they live as long as this thread."""
    count = affine_cores() + 1
    harmless = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # what each of them calls
    library.GOMP_parallel(harmless, None, count, 0)
    ready.set()
    leave.wait()
