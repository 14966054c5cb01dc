"""End a job in which a rank hangs, and print where every rank was.

A thread of each rank writes `heartbeats/rank-N` in the run folder: its phase, its step, and the
utterances it works on. Ranks wait for one another, so when one hangs all of them stop; the first to
notice writes a note for the others, each prints its state and stack, and the job ends.
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
TICK = 1.0  # seconds
TURN = 0.1  # seconds between one rank and the next, so that each can be read
REPORT_SECONDS = 5.0  # that the other ranks get to print their state
STDERR = 2  # whatever Python's own name for it points at
NOTE = "stalled"  # the file that tells the others
SHOWN = 4  # utterances


class NullWatchdog(AbstractContextManager["NullWatchdog"]):
    """Watch nothing: the run has no folder, or `stall_seconds` is 0."""

    def ping(self, phase: str, step: int, utterances: Sequence[str] = ()) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        pass


class Watchdog(NullWatchdog):
    """Write where this rank is, and end the process when it is there for ``stall_seconds``."""

    def __init__(self, folder: Path, *, stall_seconds: float) -> None:
        self._folder = folder / FOLDER
        self._stall_seconds = stall_seconds
        self._place = "in start"  # a new text with each ping
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
        """Note where the rank is; the thread writes it."""
        more = ", ..." if len(utterances) > SHOWN else ""
        on = f" on {', '.join(utterances[:SHOWN])}{more}" if utterances else ""
        self._place = f"in {phase} after step {step}{on}"

    @property
    def _file(self) -> Path:
        return self._folder / f"rank-{rank()}"

    def _watch(self) -> None:
        seen, still = "", 0.0
        while not self._over.wait(TICK):
            # Ticks are counted, not the clock: a run that was suspended did not hang.
            still = still + TICK if self._place is seen else 0.0
            if not still:
                seen = self._place
                with suppress(OSError):  # a full disk is reported by the next checkpoint
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._file.write_text(seen)
            if still >= self._stall_seconds or (self._folder / NOTE).exists():
                self._report_and_end()

    def _report_and_end(self) -> None:
        with suppress(OSError):
            (self._folder / NOTE).touch()
        time.sleep(min(rank(), 20) * TURN)
        words = (
            f"Rank {rank()}: every rank must move on within {self._stall_seconds:g} s, but one "
            "stands still. Where they were when they last moved:\n"
            + "\n".join(f"  rank {each} {self._last_place(each)}" for each in range(world_size()))
            + "\nFix what holds it up, or raise `stall_seconds` if it was only slow. The same "
            f"command continues from the last checkpoint. What rank {rank()} is doing:\n"
        )
        os.write(STDERR, words.encode())
        faulthandler.dump_traceback(STDERR)
        time.sleep(REPORT_SECONDS)
        os._exit(STALLED)

    def _last_place(self, number: int) -> str:
        """Describe where a rank is; one that never wrote may be the one that hangs."""
        file = self._folder / f"rank-{number}"
        try:
            return f"{file.read_text()}, for {time.time() - file.stat().st_mtime:.0f} s"
        except OSError:
            return "gave no sign of life"
