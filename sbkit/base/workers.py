"""Processes and threads that only make work faster.

Where the system refuses them, as without /dev/shm or under a limit on processes, the caller does
their work, with a note. A worker process leaves signals to its parent, and ends with it. A forked
process has none of them: what holds them starts anew there (`start_anew_in_forks`).
"""

import logging
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

from sbkit.base.messages import note_once

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

Pool = TypeVar("Pool", bound="ProcessPoolExecutor")

# Of semaphores and shared memory, of fork and clone, of a Python without semaphores, and in a
# daemonic process, which may have no children
START_ERRORS = (OSError, RuntimeError, ImportError, AssertionError)


def note_refusal(work: str, error: Exception) -> None:
    """Log once that work goes on; ``work`` ends in what it lacks, such as "without workers"."""
    reason = str(error).partition("\n")[0]
    note = f"note: {work}: the system refuses them ({reason})."
    note_once(note, key=work, level=logging.WARNING)


def start_processes(work: str, make_pool: Callable[[], Pool]) -> Pool | None:
    """Make a pool of loky and start its processes; None, with a note, if the system refuses them.

    work: what the caller does without them, such as "decoding texts".
    """
    pool = None
    try:
        pool = make_pool()
        pool.submit(os.getpid).result()
        return pool
    except START_ERRORS as error:
        note_refusal(f"{work} without other processes", error)
        if pool is not None:
            for pid in [*pool._processes]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # it may ignore SIGTERM
            with suppress(RuntimeError):  # the thread that it joins was not started
                pool.shutdown(kill_workers=True)
        return None


class _NoThreadError(Exception):
    """A pool has no thread, and none can be started."""


class ThreadPool(ThreadPoolExecutor):
    """A pool whose caller does the work itself where no thread can be started."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except _NoThreadError as error:
            note_refusal("working without other threads", error)
        future = Future[Any]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads:  # otherwise, those that were started do the work
                self._work_queue.get_nowait()
                raise _NoThreadError(str(error)) from error


class Restartable(Protocol):
    """Holds processes or threads."""

    def start_anew(self) -> None:
        """Forget those of the parent of this forked process, and start others when needed."""


_holders = WeakSet[Restartable]()


def start_anew_in_forks(holder: Restartable) -> None:
    """Call `start_anew` of a holder in each process that this one forks."""
    _holders.add(holder)


def _start_all_anew() -> None:
    # Of multiprocessing, which would join them when this process exits
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    for holder in [*_holders]:
        holder.start_anew()


os.register_at_fork(after_in_child=_start_all_anew)


def begin_work(parent: int) -> None:
    """Prepare a worker process; ``parent`` is the id of the process that started it.

    A signal may reach all processes of a job, and the parent decides what follows. If the parent is
    killed, a worker would wait for it forever.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
