"""How OpenMP's threads wait between two operations: awake while nobody else needs the cores.

A thread that spins is ready at once, and a sleeping thread has to be woken. But spinning threads
take the cores from other processes that have work, and then from each other. RTFx of the default
YAML on two cores, the median of several rounds:

                                          idle machine    beside a busy process
    GNU OpenMP's defaults                          151                        9
    OMP_WAIT_POLICY=active                         157                       10
    OMP_WAIT_POLICY=passive                         89                       88
    this module                                    157                       85

GNU OpenMP spins GOMP_SPINCOUNT times, or as often as its throttled count says while it has more
threads than the machine has processors; with OMP_WAIT_POLICY=passive the throttled count is zero
(libgomp's env.c and config/linux/wait.h). So if both are set, starting one more team of threads,
asleep, turns spinning off, and ending that team turns it on again. Results do not change, because
the work is divided among the same threads.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from sbkit.base.machine import affine_cores, usable_cores

SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000000"}  # about 50 ms awake
CHECK_SECONDS = 0.25
BUSY_SHARE = 0.1  # of the time, threads here waited for a core; on an idle machine 0.01 to 0.04
QUIET_CHECKS = 8  # in a row, before threads spin again
# sentencepiece brings another libgomp.
LIBRARY_PATHS = ("/torch/lib/libgomp", "/torch.libs/libgomp")


def prepare_waiting() -> bool:
    """Set up OpenMP before anything loads it; return whether `ThreadWaiting` decides how it waits.

    OpenMP starts a thread for each core of the affinity. If a container's quota allows fewer,
    OMP_NUM_THREADS is set to the quota: more threads would use up each other's time.

    `ThreadWaiting` does not decide if the user has set one of SETTINGS, if one thread does all the
    work, or if the system does not report how long threads wait for a core.
    """
    if usable_cores() < affine_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    # A parent of this process may have set SETTINGS here.
    if _user_settings() not in ({}, SETTINGS) or os.environ.get("OMP_NUM_THREADS") == "1":
        return False
    if seconds_without_core() is None:
        return False
    os.environ.update(SETTINGS)
    return True


def describe_waiting(num_threads: int) -> str:
    """Describe for the log how threads wait between two operations."""
    if num_threads == 1:
        return "one thread"
    settings = _user_settings()
    if settings == SETTINGS:
        return f"{num_threads} threads, which sleep between operations while others need the cores"
    written = " ".join(f"{name}={value}" for name, value in settings.items())
    return f"{num_threads} threads, which wait as {written or 'OpenMP does by itself'}"


def _user_settings() -> dict[str, str]:
    return {name: os.environ[name] for name in SETTINGS if name in os.environ}


def seconds_without_core() -> float | None:
    """Return for how many seconds threads of this process were ready to run and had no core.

    None if the system does not report it. Threads that have ended are not counted.
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
    """Watch whether others need the cores while a command runs, and switch spinning off and on."""

    def __init__(self) -> None:
        self._quiet_checks = 0
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._end_of_team: threading.Event | None = None

    def __enter__(self) -> "ThreadWaiting":
        if prepare_waiting():
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        self.spin()

    def sleep(self) -> None:
        """Start a second team of threads, which sleeps; do nothing before OpenMP is loaded."""
        library = loaded_library()
        if self._end_of_team is None and library is not None:
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
        """Sleep or spin, given the share of the time in which threads waited for a core."""
        self._quiet_checks = 0 if share > BUSY_SHARE else self._quiet_checks + 1
        if self._quiet_checks == 0:
            self.sleep()  # again and again: OpenMP may not have been loaded before
        elif self._quiet_checks >= QUIET_CHECKS:
            self.spin()

    def _watch(self) -> None:
        waited_before, since = seconds_without_core() or 0.0, time.perf_counter()
        while not self._stop.wait(CHECK_SECONDS):
            waited, now = seconds_without_core() or waited_before, time.perf_counter()
            self.decide((waited - waited_before) / (now - since))
            waited_before, since = waited, now


def loaded_library() -> ctypes.CDLL | None:
    """Open torch's OpenMP if it is loaded and is GNU's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if any(path in line for path in LIBRARY_PATHS):
            return ctypes.CDLL(line.split(maxsplit=5)[-1])
    return None


def _hold_team(library: ctypes.CDLL, end: threading.Event, ready: threading.Event) -> None:
    """Start one thread more than OpenMP may use processors; they live as long as this thread."""
    num_threads = affine_cores() + 1
    harmless = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # called by every thread
    library.GOMP_parallel(harmless, None, num_threads, 0)
    ready.set()
    end.wait()
