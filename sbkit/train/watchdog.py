"""End a job in which a rank hangs, and print where every rank was.

A thread of each rank writes `heartbeats/rank-N.json` in the run folder once a second: its step, its
phase, the utterances it works on. Ranks wait for one another, so when one hangs all of them stop;
the first to notice writes a note for the others, each prints its state and stack, and the job ends.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sbkit.base.errors import STALLED
from sbkit.base.files import written_beside
from sbkit.distributed.ranks import rank, world_size

FOLDER = "heartbeats"
TICK = 1.0  # seconds
TURN = 0.1  # seconds between one rank and the next, so that each can be read
REPORT_SECONDS = 5.0  # that the other ranks get to print their state
STDERR = 2  # whatever Python's own name for it points at
NOTE = "stalled"  # the file that tells the others


@dataclass(frozen=True)
class Beat:
    """Where a rank is."""

    phase: str = "start"
    step: int = 0  # of the optimizer
    utterances: tuple[str, ...] = ()
    since: float = field(default_factory=time.time)  # seconds since 1970

    def __str__(self) -> str:
        shown = ", ".join(self.utterances[:4]) + (", ..." if len(self.utterances) > 4 else "")
        on = f" on {shown}" if shown else ""
        return f"in {self.phase} after step {self.step}{on}, for {time.time() - self.since:.0f} s"


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
        self._last = Beat()
        self._still = 0.0  # seconds since the last ping
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        """Start, after removing the files of an earlier job."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._leftovers():
            file.unlink(missing_ok=True)
        self._last = Beat()
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
        self._last = Beat(phase, step, tuple(utterances))

    def _leftovers(self) -> list[Path]:
        """List what this rank removes: its own file, and on rank 0 those of all."""
        files = [*self._folder.glob("*rank-*.json*")] if rank() == 0 else [self._file]
        return [self._folder / NOTE, *files]

    @property
    def _file(self) -> Path:
        return self._folder / f"rank-{rank()}.json"

    def _watch(self) -> None:
        seen = self._last
        while not self._over.wait(TICK):
            # Ticks are counted, not the clock: a run that was suspended did not hang.
            self._still = self._still + TICK if self._last is seen else 0.0
            seen = self._last
            self._write(seen)
            if self._still >= self._stall_seconds or (self._folder / NOTE).exists():
                self._report_and_end()

    def _write(self, beat: Beat) -> None:
        with suppress(OSError):  # a full disk is reported by the next checkpoint
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_beside(self._file) as beside, beside.open("x") as file:
                json.dump({"rank": rank(), **asdict(beat)}, file)

    def _report_and_end(self) -> None:
        with suppress(OSError):
            (self._folder / NOTE).touch()
        time.sleep(min(rank(), 20) * TURN)
        words = (
            f"Rank {rank()}: every rank must move on within {self._stall_seconds:g} s, but one "
            "stands still. Where they were when they last moved:\n"
            + "\n".join(words_of_ranks(self._folder))
            + "\nFix what holds it up, or raise `stall_seconds` if it was only slow. The same "
            f"command goes on from the last checkpoint. What rank {rank()} is doing:\n"
        )
        os.write(STDERR, (words + stacks()).encode())
        time.sleep(REPORT_SECONDS)
        os._exit(STALLED)


def stacks() -> str:
    """Return the stack of every thread."""
    frames = sys._current_frames().values()
    return "\n".join("".join(traceback.format_stack(frame)) for frame in frames)


def words_of_ranks(folder: Path) -> list[str]:
    """Describe where every rank of the job is; one that never wrote may be the one that hangs."""
    beats, silent = read_beats(folder), "gave no sign of life"
    return [f"  rank {each} {beats.get(each, silent)}" for each in range(world_size())]


def read_beats(folder: Path) -> dict[int, Beat]:
    """Read the last file of each rank that wrote one."""
    beats = {}
    for file in folder.glob("rank-*.json"):
        # Just being replaced, or another's; without this rank's own words the job would not end.
        with suppress(Exception):
            record = json.loads(file.read_text())
            number = record.pop("rank")
            beats[number] = Beat(**record)
    return beats
