"""A rank writes heartbeats while it works, and removes them at the end; a hanging one is ended."""

import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

from sbkit.train.watchdog import HEARTBEAT_FOLDER, NOTE, Watchdog
from tests import processes

SUSPENDED = """
import os, signal, sys, time
from pathlib import Path
from sbkit.train import watchdog

watchdog.TICK_SECONDS, watchdog.REPORT_SECONDS = 0.05, 0.1
with watchdog.Watchdog(Path(sys.argv[1]), stall_seconds=0.5) as running:
    for step in range(30):
        running.ping("step", step)
        time.sleep(0.05)
        if step == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_suspended_run_continues(tmp_path: Path) -> None:
    running = processes.Process(["-c", SUSPENDED, tmp_path])
    state = Path(f"/proc/{running.pid}/stat")
    while not state.read_text().rpartition(") ")[2].startswith("T"):  # stopped
        time.sleep(0.01)
    time.sleep(2.0)  # more than twice `stall_seconds`
    os.kill(running.pid, signal.SIGCONT)
    assert running.wait(240) == 0, running.communicate()


def test_heartbeat_files_are_removed_at_end_of_run(tmp_path: Path) -> None:
    folder = tmp_path / HEARTBEAT_FOLDER
    folder.mkdir()
    (folder / NOTE).touch()  # of a run before
    (folder / "rank-0").write_text("in valid after step 12")
    with patch("sbkit.train.watchdog.TICK_SECONDS", 0.02), Watchdog(tmp_path, stall_seconds=60):
        while not (folder / "rank-0").exists() or (folder / "rank-0").read_text() != "in start":
            time.sleep(0.02)
    assert not folder.exists()


def test_unreadable_note_does_not_end_the_watch(tmp_path: Path) -> None:
    """A network folder may fail for a while."""
    file = tmp_path / HEARTBEAT_FOLDER / "rank-0"
    deadline = time.monotonic() + 60
    with (
        patch("sbkit.train.watchdog.TICK_SECONDS", 0.02),
        patch.object(Path, "exists", side_effect=PermissionError),
        Watchdog(tmp_path, stall_seconds=60) as watchdog,
    ):
        for step in (1, 2):
            watchdog.ping("step", step)
            while not file.is_file() or file.read_text() != f"in step after step {step}":
                assert time.monotonic() < deadline
                time.sleep(0.02)
