"""Two runs do not save to one folder, and a run that is killed holds nothing."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.saves import recovered, save
from tests.processes import Process

# A run with a worker process that outlives it, as those of a DataLoader do for a while.
TRAINING = """
import os, sys, time
from sbkit.checkpoint.checkpointer import Checkpointer

os.setsid()
Checkpointer(sys.argv[1]).claim()
if os.fork() == 0:
    print("at work", flush=True)  # what it was forked with is let go by now
time.sleep(60)
"""


@contextmanager
def training(folder: Path) -> Iterator[Process]:
    """Let another process train in a folder."""
    process = Process(["-c", TRAINING, folder])
    try:
        while not process.written()[0]:
            assert process.poll() is None, process.written()
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    with training(saves) as first:
        for second in (Checkpointer(saves).check_same_model, lambda: save(saves, 1.0)):
            with pytest.raises(SbkitError, match=f"Only one run at a time may save to {saves}"):
                second()
        assert recovered(saves) is None  # who only reads is not refused
        assert Checkpointer(saves).find_whole(1) == []
        assert list(saves.iterdir()) == []

        first.kill()
        first.wait()
        save(saves, 0.5)  # its worker is still there
        assert recovered(saves) == 0.5
