"""End a job with a hanging rank, and print the position of every rank.

A thread of each rank writes `heartbeats/rank-N` in the run folder: its phase, its step, and the
utterances it works on. Ranks wait for one another, so when one hangs all of them stop. The first to
notice writes a note for the others; each prints all positions and its own stack, and the job ends.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from sbkit.base.errors import STALLED
from sbkit.distributed.ranks import rank, world_size

FOLDER = "heartbeats"
TICK_SECONDS = 1.0
SECONDS_BETWEEN_RANKS = 0.1  # between two ranks' reports, so that their lines do not mix
REPORT_SECONDS = 5.0  # for the other ranks to print their state
STDERR = 2  # file descriptor, whatever sys.stderr is
NOTE = "stalled"  # the file that notifies the other ranks
MAX_LISTED_UTTERANCES = 4


class NullWatchdog(AbstractContextManager["NullWatchdog"]):
    """Watch nothing: the run has no folder, or `stall_seconds` is 0."""

    def ping(self, phase: str, step: int, utterances: Sequence[str] = ()) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        pass


class Watchdog(NullWatchdog):
    """Write the position of this rank; end the process if it does not move in ``stall_seconds``."""

    def __init__(self, folder: Path, *, stall_seconds: float) -> None:
        self._folder = folder / FOLDER
        self._stall_seconds = stall_seconds
        self._position = "in start"  # each ping makes a new string
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        """Start, after removing the files of an earlier job."""
        for file in (self._file, self._folder / NOTE):
            file.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and remove this rank's file."""
        self._over.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)
        with suppress(OSError):  # another rank's may still be there
            self._folder.rmdir()

    def ping(self, phase: str, step: int, utterances: Sequence[str] = ()) -> None:
        """Note the position of this rank."""
        more = ", ..." if len(utterances) > MAX_LISTED_UTTERANCES else ""
        on = f" on {', '.join(utterances[:MAX_LISTED_UTTERANCES])}{more}" if utterances else ""
        self._position = f"in {phase} after step {step}{on}"

    @property
    def _file(self) -> Path:
        return self._folder / f"rank-{rank()}"

    def _watch(self) -> None:
        seen, still_seconds = "", 0.0
        while not self._over.wait(TICK_SECONDS):
            # Ticks are counted, not the clock: a run that was suspended did not hang.
            still_seconds = still_seconds + TICK_SECONDS if self._position is seen else 0.0
            if not still_seconds:
                seen = self._position
                with suppress(OSError):  # a full disk is reported by the next checkpoint
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._file.write_text(seen)
            if still_seconds >= self._stall_seconds or (self._folder / NOTE).exists():
                self._report_and_end()

    def _report_and_end(self) -> None:
        with suppress(OSError):
            (self._folder / NOTE).touch()
        time.sleep(min(rank(), 20) * SECONDS_BETWEEN_RANKS)
        words = (
            f"Rank {rank()}: a rank has not moved for {self._stall_seconds:g} s. Last positions:\n"
            + "\n".join(
                f"  rank {index} {self._last_position(index)}" for index in range(world_size())
            )
            + "\nFix what holds it up, or raise `stall_seconds` if it was only slow. The same "
            f"command resumes from the last checkpoint. The stack of rank {rank()}:\n"
        )
        os.write(STDERR, words.encode())
        faulthandler.dump_traceback(STDERR)
        time.sleep(REPORT_SECONDS)
        os._exit(STALLED)

    def _last_position(self, index: int) -> str:
        """Describe the position of a rank; one that never wrote may be the one that hangs."""
        file = self._folder / f"rank-{index}"
        try:
            return f"{file.read_text()}, for {time.time() - file.stat().st_mtime:.0f} s"
        except OSError:
            return "gave no sign of life"
