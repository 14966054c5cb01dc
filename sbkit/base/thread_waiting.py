"""How the threads of an operation wait for the next one: awake while nobody else needs the cores.

A thread that spins is ready at once, one that sleeps has to be woken; but spinning threads take the
cores from whoever else has work, and then from each other. Seconds of audio per second of the
default YAML on two cores, alone and beside a busy process (median of rounds, November 2026):

    GNU OpenMP as it comes                   151      9
    OMP_WAIT_POLICY=active                   157     10
    OMP_WAIT_POLICY=passive                   89     88
    this module                              157     85

GNU OpenMP spins GOMP_SPINCOUNT times, or as often as its throttled count says while it has more
threads than the machine has processors; with OMP_WAIT_POLICY=passive the throttled count is zero
(libgomp's env.c and config/linux/wait.h). So with both set, one more team of threads, asleep,
turns spinning off, and its end turns it on again. Results do not change: the work is cut alike.
"""

import ctypes
import os
import threading
import time
from pathlib import Path

from sbkit.base.cores import affine_cores, usable_cores

SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000000"}  # about 50 ms awake
EVERY = 0.25  # seconds between two looks at who needs the cores
BUSY = 0.1  # share of the time that threads here waited for a core; it is 0.01 to 0.04 alone
QUIET_LOOKS = 8  # in a row, before threads spin again
LIBRARY = ("/torch/lib/libgomp", "/torch.libs/libgomp")  # sentencepiece brings one of its own


def prepare_waiting() -> bool:
    """Set up OpenMP, before anything loads it; return whether this module decides how it waits.

    OpenMP starts a thread for each core of the affinity. Where a container's quota allows fewer,
    OMP_NUM_THREADS is set to that: more threads would use up each other's time.

    This module does not decide where the user has set one of SETTINGS, where one thread does all
    the work, and where the system does not tell how long threads wait for a core.
    """
    if usable_cores() < affine_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    given = _given()
    if given not in ({}, SETTINGS):  # the latter is what a parent of this process has set here
        return False
    if os.environ.get("OMP_NUM_THREADS") == "1" or waited_for_cores() is None:
        return False
    os.environ.update(SETTINGS)
    return True


def describe_waiting(count: int) -> str:
    """Write for the log how ``count`` threads wait between two operations."""
    if count == 1:
        return "one thread"
    given = _given()
    if given == SETTINGS:
        return f"{count} threads, which sleep between operations while others need the cores"
    settings = " ".join(f"{name}={value}" for name, value in given.items())
    return f"{count} threads, which wait as {settings or 'OpenMP does by itself'}"


def _given() -> dict[str, str]:
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def waited_for_cores() -> float | None:
    """Return for how many seconds threads of this process were ready to run and had no core.

    None where the system does not tell. A thread that has ended is not counted any more.
    """
    total = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
    except (OSError, IndexError, ValueError):
        return None
    return total / 1e9


class SecondTeam:
    """Turn spinning off by a second team of OpenMP threads, which sleeps while it is there."""

    def __init__(self) -> None:
        self._leave: threading.Event | None = None

    def sleep(self) -> None:
        """Start the team; does nothing where no OpenMP is loaded yet."""
        library = loaded_library()
        if self._leave is not None or library is None:
            return
        self._leave, ready = threading.Event(), threading.Event()
        arguments = (library, self._leave, ready)
        threading.Thread(target=_hold_team, args=arguments, daemon=True).start()
        ready.wait()

    def spin(self) -> None:
        """End the team."""
        if self._leave is not None:
            self._leave.set()
            self._leave = None


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


class ThreadWaiting:
    """Watch who needs the cores while a command runs, and switch."""

    def __init__(self) -> None:
        self._switch = SecondTeam()
        self._quiet = 0
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

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
        self._switch.spin()

    def decide(self, share: float) -> None:
        """Switch by the share of the time in which threads waited for a core."""
        self._quiet = 0 if share > BUSY else self._quiet + 1
        if self._quiet == 0:
            self._switch.sleep()  # again and again: OpenMP may not have been loaded before
        elif self._quiet >= QUIET_LOOKS:
            self._switch.spin()

    def _watch(self) -> None:
        before, since = waited_for_cores() or 0.0, time.perf_counter()
        while not self._leave.wait(EVERY):
            waited, now = waited_for_cores() or before, time.perf_counter()
            self.decide((waited - before) / (now - since))
            before, since = waited, now
