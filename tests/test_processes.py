"""A process that is forked for a test is as new as a fresh one, and ends as one."""

import signal
from pathlib import Path

from tests import processes
from tests.processes import Process

NEW = """
import json, os, sys, threading
import torch
print(sys.argv, __name__, threading.active_count(), torch.get_num_threads())
print(os.environ["OWN"], os.getcwd(), sorted(os.environ.keys() & {"RANK", "WORLD_SIZE"}))
print("tests.test_processes" in sys.modules, file=sys.stderr)
import atexit
atexit.register(print, "the end")
sys.exit(7)
"""


def test_it_knows_what_it_is_given_and_nothing_of_the_tests(tmp_path: Path) -> None:
    done = processes.run(["-c", NEW, "one", 2], cwd=tmp_path, OWN="this")
    assert done.returncode == 7
    assert done.stdout.splitlines() == [
        "['-c', 'one', '2'] __main__ 1 1",
        f"this {tmp_path} []",
        "the end",
    ]
    assert done.stderr == "False\n"


def test_an_error_and_a_signal_are_seen() -> None:
    done = processes.run(["-c", "raise ValueError('so')"])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: so"
    process = Process(["-c", "import time; time.sleep(60)"])
    assert process.poll() is None
    process.kill()
    assert process.wait() == process.returncode == -signal.SIGKILL


RANK = """
import os, signal, sys, time
print(os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
if os.environ["RANK"] == "1":
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
time.sleep(60)
"""


def test_when_a_rank_fails_the_others_are_asked_to_leave() -> None:
    done = processes.run(["-c", RANK], ranks=2)
    assert done.returncode == 3
    assert done.stdout == "1 2\n0 2\n"
