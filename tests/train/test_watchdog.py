"""A rank leaves a sign of life while it is at work, and none afterwards; a silent one is ended."""

import json
import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

from sbkit.base.errors import STALLED
from sbkit.train.watchdog import (
    FOLDER,
    NOTE,
    Beat,
    Watchdog,
    read_beats,
    words_of_ranks,
)
from tests import processes

HANGING = """
import sys, time
from pathlib import Path
from sbkit.train import watchdog

watchdog.TICK, watchdog.REPORT_SECONDS = 0.05, 0.1
with watchdog.Watchdog(Path(sys.argv[1]), stall_seconds=0.5) as running:
    for step in range(10):
        running.ping("step", step, ["clip7", "clip8"])
        time.sleep(0.06)

    def hang():
        time.sleep(60)

    hang()
"""


def test_a_rank_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    done = processes.run(["-c", HANGING, tmp_path], timeout=60)
    assert done.returncode == STALLED
    assert "in hang" in done.stderr
    assert "rank 0 in step after step 9 on clip7, clip8, for" in done.stderr
    assert "`stall_seconds`" in done.stderr


SUSPENDED = """
import os, signal, sys, time
from pathlib import Path
from sbkit.train import watchdog

watchdog.TICK, watchdog.REPORT_SECONDS = 0.05, 0.1
with watchdog.Watchdog(Path(sys.argv[1]), stall_seconds=0.5) as running:
    for step in range(30):
        running.ping("step", step)
        time.sleep(0.05)
        if step == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_run_that_was_suspended_goes_on(tmp_path: Path) -> None:
    running = processes.Process(["-c", SUSPENDED, tmp_path])
    while not is_stopped(running):
        time.sleep(0.01)
    time.sleep(2.0)  # more than it may stand still, and than two times that
    os.kill(running.pid, signal.SIGCONT)
    assert running.wait(60) == 0, running.communicate()


def is_stopped(running: processes.Process) -> bool:
    state = Path(f"/proc/{running.pid}/stat").read_text().rpartition(") ")[2]
    return state.startswith("T")


def test_a_sign_of_life_can_be_read_and_goes_with_the_run(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / NOTE).touch()  # of a run before
    write_beat(tmp_path / FOLDER, 7)  # of a larger one
    with patch("sbkit.train.watchdog.TICK", 0.02), Watchdog(tmp_path, stall_seconds=60) as watchdog:
        watchdog.ping("valid", 12, [f"clip{number}" for number in range(9)])
        seen: dict[int, Beat] = {}
        while 0 not in seen or seen[0].phase != "valid":
            time.sleep(0.02)
            seen = read_beats(tmp_path / FOLDER)
        ((number, ping),) = seen.items()
        assert (number, ping.step, len(ping.utterances)) == (0, 12, 9)
        assert str(ping).startswith(
            "in valid after step 12 on clip0, clip1, clip2, clip3, ..., for"
        )
    assert not (tmp_path / FOLDER).exists()


def test_a_rank_that_never_gave_a_sign_of_life_is_named(tmp_path: Path) -> None:
    """One that was stopped early may be the one that hangs; one that is not in the job is not."""
    for number in (0, 2, 7):
        write_beat(tmp_path, number)
    (tmp_path / "rank-1.json").write_text("{")  # just being replaced
    with patch("sbkit.train.watchdog.world_size", lambda: 3):
        first, second, third = words_of_ranks(tmp_path)
    assert first.startswith("  rank 0 in step after step 5 on clip7, for")
    assert second == "  rank 1 gave no sign of life"
    assert third.startswith("  rank 2 in step")


def write_beat(folder: Path, number: int) -> None:
    ping = {"rank": number, "phase": "step", "step": 5, "utterances": ["clip7"], "since": 0.0}
    (folder / f"rank-{number}.json").write_text(json.dumps(ping))
