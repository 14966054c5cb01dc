"""Report a hang: write where a rank stands, and the stacks of its threads.

While a rank works, `heartbeat-N` in the run folder has its phase, its step and the utterances it
works on. Without a ping for too long, Python's faulthandler appends the stacks there and prints
them. It does so from a thread in C, even while a function in C holds Python's lock.

Ranks wait for one another, so a rank that hangs then ends, and with it the job. A single process,
for which nobody waits, continues: it may stand in a debugger.
"""

import faulthandler
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import speechbrain as sb

from sbkit.base.messages import listed
from sbkit.base.process import is_command
from sbkit.base.stores import store_patience
from sbkit.distributed.ranks import rank, world_size
from sbkit.logs.progress import reporting

STDERR = 2  # file descriptor, whatever sys.stderr is


class Watchdog:
    """Report a hang after ``seconds`` without a ping.

    Without a folder, with 0 seconds, or in another program than our commands, nothing is watched:
    the timer of faulthandler, the only one of a process, is the program's. A forked process must
    not ping, because it lacks the thread that it would wait for.
    """

    def __init__(self, folder: Path | None, *, seconds: float) -> None:
        self._is_watching = folder is not None and seconds > 0 and is_command()
        self._path = (folder or Path()) / f"heartbeat-{rank()}"
        self._seconds = seconds

    def __enter__(self) -> Self:
        if self._is_watching:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
            # faulthandler writes to one file. In a session of its own, because Ctrl-C or torchrun
            # would end it with the rank.
            self._tee = subprocess.Popen(
                ["tee", "-a", self._path.name],
                cwd=self._path.parent,
                stdin=subprocess.PIPE,
                stdout=STDERR,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_watching:
            return
        faulthandler.cancel_dump_traceback_later()
        with self._file, self._tee:
            self._tee.kill()  # forked workers may hold its input open
        with suppress(OSError):  # the disk is away
            self._path.unlink()

    def ping(self, phase: str, step: int, utterances: Sequence[str] = ()) -> None:
        if not self._is_watching:
            return
        assert self._tee.stdin is not None
        faulthandler.dump_traceback_later(
            self._seconds, exit=world_size() > 1, file=self._tee.stdin
        )
        position = f"since {time.strftime('%H:%M:%S')} in {phase} after step {step}"
        if utterances:
            position += f" on {listed(utterances)}"
        with suppress(OSError):  # a full disk is reported by the next checkpoint
            os.ftruncate(self._file.fileno(), 0)
            os.pwrite(self._file.fileno(), f"{position}\n".encode(), 0)


@contextmanager
def watching(brain: sb.Brain) -> Iterator[None]:
    """Watch for a hang, and wait for stores that are away."""
    seconds, patience = (
        brain.settings[name] or 0  # None for never
        for name in ("stall_seconds", "store_patience")
    )
    with (
        # A rank does not hang while it, or another one, waits for a store that is away.
        Watchdog(brain.run_folder, seconds=seconds and seconds + patience) as brain.watchdog,
        store_patience(patience),
        reporting(brain.ping, show_progress=not brain.noprogressbar),
    ):
        brain.ping("start")
        yield
