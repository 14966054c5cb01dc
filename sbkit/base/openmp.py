"""Let OpenMP's threads spin between operations, or sleep while other processes need the cores.

A spinning thread is ready at once; a sleeping thread has to be woken. But spinning threads take the
cores from other processes that have work, and then from each other. RTFx of the default YAML on two
cores, the median of several rounds:

                                          idle machine       with a busy process
    GNU OpenMP's defaults                          151                        9
    OMP_WAIT_POLICY=active                         157                       10
    OMP_WAIT_POLICY=passive                         89                       88
    this module                                    157                       85

GNU OpenMP spins GOMP_SPINCOUNT times. While it has more threads than the machine has processors, it
spins by a throttled count instead, which OMP_WAIT_POLICY=passive makes zero (libgomp's env.c and
config/linux/wait.h). So if both are set, one more team of sleeping threads turns spinning off.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from sbkit.base.machine import allowed_cores, usable_cores

SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000000"}  # about 50 ms awake
CHECK_SECONDS = 0.25
BUSY_SHARE = 0.1  # of the time that threads wait for a core; an idle machine has 0.01 to 0.04
QUIET_CHECKS = 8  # in a row, before threads spin again
LIBRARY_PATHS = ("/torch/lib/libgomp", "/torch.libs/libgomp")  # sentencepiece has its own libgomp


def prepare_waiting() -> bool:
    """Set up OpenMP before it is loaded; return whether `ThreadWaiting` decides how it waits."""
    if usable_cores() < allowed_cores():  # by a container's quota, which OpenMP ignores
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    is_set_by_user = settings not in ({}, SETTINGS)  # a parent process may have set SETTINGS
    has_one_thread = os.environ.get("OMP_NUM_THREADS") == "1"
    if is_set_by_user or has_one_thread or seconds_without_core() is None:
        return False
    os.environ.update(SETTINGS)
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


class ThreadWaiting:
    """Switch spinning off and on while a command runs, as other processes need the cores."""

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
        """Start a second team of threads, which sleeps; do nothing if OpenMP is not loaded."""
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


def _hold_team(library: ctypes.CDLL, end: threading.Event, ready: threading.Event) -> None:
    """Start one OpenMP thread more than there are processors, until `end` is set."""
    num_threads = allowed_cores() + 1
    function = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # harmless in every thread
    library.GOMP_parallel(function, None, num_threads, 0)
    ready.set()
    end.wait()
