"""End a job in which a rank hangs, after each rank has printed where it is.

A thread of each rank writes `heartbeats/rank-N` in the run folder: the rank's phase, its step, and
the utterances it works on. Ranks wait for one another, so when one hangs, all of them stop. The
first rank to notice writes a note for the others. Then each rank prints the positions of all ranks
and its own stack, and the job ends.

Ranks do not hang while one waits for a store that is away.

Nobody waits for a single process, which may stand in a debugger: it logs a warning with its stack,
once for each stall, and goes on.
"""

import faulthandler
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from sbkit.base.errors import STALLED
from sbkit.base.machine import SHORTAGES
from sbkit.base.stores import WAIT
from sbkit.distributed.ranks import rank, world_size

logger = logging.getLogger(__name__)

HEARTBEAT_FOLDER = "heartbeats"
NOTE = "stalled"  # the file in the folder that notifies the other ranks
TICK_SECONDS = 1.0
SECONDS_BETWEEN_RANKS = 0.1  # between two ranks' reports, so that their lines do not mix
MAX_DELAY_SECONDS = 2.0  # of the last rank's report; with many ranks, reports are closer together
REPORT_SECONDS = 5.0  # for the other ranks to print their reports
STDERR = 2  # file descriptor, whatever sys.stderr is
MAX_LISTED_UTTERANCES = 4
MAX_LISTED_FRAMES = 20  # a notebook's kernel has many more


class Watchdog:
    """Write the position of this rank; act after ``stall_seconds`` without a ping.

    One process of several ends. A single one logs a warning. Without a folder, or with 0 seconds,
    nothing is watched.
    """

    def __init__(self, folder: Path | None, *, stall_seconds: float) -> None:
        self._is_watching = folder is not None and stall_seconds > 0
        self._folder = (folder or Path()) / HEARTBEAT_FOLDER
        self._wait = (folder or Path()) / WAIT
        self._stall_seconds = stall_seconds
        # Compared by identity: each ping makes a new string, even with the same text.
        self._position = "in start"
        self._watched_thread = threading.get_ident()
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        if not self._is_watching:
            return self
        for file in (self._file, self._folder / NOTE, self._wait):
            file.unlink(missing_ok=True)
        # Not earlier: threads refer to standard error, and thereby to all variables of a notebook.
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_watching:
            return
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):  # another rank's file may still be there
            self._file.unlink(missing_ok=True)
            self._wait.unlink(missing_ok=True)
            self._folder.rmdir()

    def ping(self, phase: str, step: int, utterances: Sequence[str] = ()) -> None:
        position = f"in {phase} after step {step}"
        if utterances:
            position += f" on {', '.join(utterances[:MAX_LISTED_UTTERANCES])}"
        if len(utterances) > MAX_LISTED_UTTERANCES:
            position += ", ..."
        self._position = position

    @property
    def _file(self) -> Path:
        return self._folder / f"rank-{rank()}"

    def _watch(self) -> None:
        last_position = ""
        stalled_seconds = wait = 0.0
        while not self._stopped.wait(TICK_SECONDS):
            position = self._position
            if position is last_position:
                # Ticks are counted, instead of reading the clock: a suspended run does not hang.
                last_wait, wait = wait, self._last_wait()
                stalled_seconds = stalled_seconds + TICK_SECONDS if wait == last_wait else 0.0
            else:
                last_position = position
                stalled_seconds = 0.0
                with suppress(OSError):  # a full disk is reported by the next checkpoint
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._file.write_text(position)
            is_stalled = stalled_seconds >= self._stall_seconds
            # Path.exists raises while a network folder fails
            is_notified = os.path.exists(self._folder / NOTE)  # noqa: PTH110
            if world_size() > 1 and (is_stalled or is_notified):
                self._report_and_end()
            elif is_stalled:
                self._warn()
                stalled_seconds = -math.inf  # once for each stall

    def _last_wait(self) -> float:
        """Return when a rank last waited for a store, which may be that of the folder itself."""
        try:
            return self._wait.stat().st_mtime
        except OSError as error:
            return 0.0 if isinstance(error, FileNotFoundError) else time.time()

    def _warn(self) -> None:
        frame = sys._current_frames().get(self._watched_thread)
        stack = "".join(traceback.format_stack(frame, limit=MAX_LISTED_FRAMES))
        logger.warning(
            f"The run has not moved for {self._stall_seconds:g} s, {self._position}; it waits on. "
            f"Raise `stall_seconds` if it was only slow. {SHORTAGES}\n"
            f"The innermost calls:\n{stack}"
        )

    def _report_and_end(self) -> None:
        with suppress(OSError):
            (self._folder / NOTE).touch()
        time.sleep(rank() * min(SECONDS_BETWEEN_RANKS, MAX_DELAY_SECONDS / world_size()))
        report = [
            f"Rank {rank()}: a rank has not moved for {self._stall_seconds:g} s. Last positions:",
            *(f"  rank {n} {self._last_position(n)}" for n in range(world_size())),
            f"Raise `stall_seconds` if it was only slow. {SHORTAGES}",
            f"The stack of rank {rank()}:\n",
        ]
        with suppress(OSError):  # nobody can read it
            os.write(STDERR, "\n".join(report).encode())
        faulthandler.dump_traceback(STDERR)
        time.sleep(REPORT_SECONDS)
        os._exit(STALLED)

    def _last_position(self, index: int) -> str:
        """Describe the last position that a rank wrote."""
        file = self._folder / f"rank-{index}"
        try:
            position = file.read_text() or "in an unknown position"  # while it is written
            seconds = time.time() - file.stat().st_mtime
        except OSError:
            return "gave no sign of life"
        return f"{position}, for {seconds:.0f} s"
