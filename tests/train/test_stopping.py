"""Signals are heard, and ranks agree on them without asking in every step."""

import os
import pty
import signal
import subprocess
import sys
from unittest.mock import patch

import pytest

from sbkit.train.stopping import MAX_STEPS_BETWEEN_QUESTIONS, RankConsensus, StopSignals

HANGS_UP = """
import os, signal, sys
from sbkit.train.stopping import StopSignals
with StopSignals() as signals:
    print("listening", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGHUP)
    for _ in range(10):
        print("a step", flush=True)
    assert signals.received is signal.SIGHUP
sys.exit(75)
"""


def test_who_was_started_with_nohup_stays_deaf() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    """Words to it would be an OSError, before anything is saved."""
    leader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS_UP],
        stdin=subprocess.PIPE,
        stdout=terminal,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    heard = b""
    while b"\n" not in heard:  # else the end of its line meets a terminal that is gone
        heard += os.read(leader, 100)
    assert heard.startswith(b"listening")
    os.close(leader)
    _, _ = process.communicate("go on\n", timeout=240)
    assert process.returncode == 75


def test_alone_a_wish_is_granted_at_once() -> None:
    consensus = RankConsensus()
    for stop, save in ((False, False), (True, False), (False, True)):
        assert consensus.ask(stop=stop, save=save) == (stop, save)


@pytest.mark.parametrize(
    ("seconds", "questions"),
    [
        (0.25, [1, 2, 6, 10, 14, 18]),  # every second of training
        (5.0, list(range(1, 21))),  # after every step, where one takes longer
        (1e-9, [1, 2]),  # and at most so many steps apart (MAX_STEPS_BETWEEN_QUESTIONS)
    ],
)
def test_ranks_ask_one_another_about_every_second(seconds: float, questions: list[int]) -> None:
    """The other rank is as fast, and wishes nothing."""
    steps, asked = list[None](), list[int]()

    def gather(value: tuple[bool, bool, float]) -> list[tuple[bool, bool, float]]:
        asked.append(len(steps))
        return [value, (False, False, value[2])]

    def after_a_step(*, stop: bool) -> tuple[bool, bool]:
        steps.append(None)
        return consensus.ask(stop=stop, save=False)

    consensus = RankConsensus(clock=lambda: seconds * len(steps))
    with (
        patch("sbkit.train.stopping.world_size", lambda: 2),
        patch("sbkit.train.stopping.gather_over_ranks", gather),
    ):
        assert [after_a_step(stop=False) for _ in range(20)] == [(False, False)] * 20
        assert asked == questions
        wishes = asked[-1] + MAX_STEPS_BETWEEN_QUESTIONS - 20
        assert any(after_a_step(stop=True)[0] for _ in range(wishes))
