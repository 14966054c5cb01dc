"""Threads spin while nobody else needs the cores, and sleep while others do."""

import json
import os
import subprocess
import sys

import pytest

from sbkit.base.cores import affine_cores
from sbkit.base.thread_waiting import (
    BUSY,
    QUIET_LOOKS,
    SETTINGS,
    SecondTeam,
    ThreadWaiting,
    describe_waiting,
    prepare_waiting,
    waited_for_cores,
)
from tests.runs import ROOT


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Start from an environment that says nothing of threads, and come back to that of the test."""
    for name in (*SETTINGS, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "decides", "said"),
    [
        ({}, True, "4 threads, which sleep between operations while others need the cores"),
        (SETTINGS, True, "4 threads, which sleep between operations while others need the cores"),
        ({"OMP_WAIT_POLICY": "active"}, False, "4 threads, which wait as OMP_WAIT_POLICY=active"),
        ({"OMP_WAIT_POLICY": "passive"}, False, "4 threads, which wait as OMP_WAIT_POLICY=passive"),
        ({"GOMP_SPINCOUNT": "0"}, False, "4 threads, which wait as GOMP_SPINCOUNT=0"),
        ({"OMP_NUM_THREADS": "1"}, False, "4 threads, which wait as OpenMP does by itself"),
    ],
)
def test_what_the_user_has_set_is_left_alone(
    given: dict[str, str], decides: bool, said: str, variables: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        variables.setenv(name, value)
    assert prepare_waiting() is decides
    assert describe_waiting(4) == said
    assert describe_waiting(1) == "one thread"


def test_a_container_with_fewer_cores_has_fewer_threads(variables: pytest.MonkeyPatch) -> None:
    variables.setattr("sbkit.base.thread_waiting.affine_cores", lambda: 8)
    variables.setattr("sbkit.base.thread_waiting.usable_cores", lambda: 2)
    prepare_waiting()
    assert os.environ["OMP_NUM_THREADS"] == "2"
    variables.setenv("OMP_NUM_THREADS", "3")
    prepare_waiting()
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_threads_sleep_at_once_and_spin_again_after_a_while_of_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("sleep", "spin"):
        monkeypatch.setattr(SecondTeam, name, lambda self, name=name: calls.append(name))
    waiting = ThreadWaiting()
    waiting.decide(BUSY / 2)
    assert not calls
    waiting.decide(2 * BUSY)
    assert calls == ["sleep"]
    for _ in range(QUIET_LOOKS - 1):
        waiting.decide(0.0)
    assert calls == ["sleep"]
    waiting.decide(0.0)
    assert calls == ["sleep", "spin"]


def test_a_process_knows_how_long_it_waited_for_a_core() -> None:
    before = waited_for_cores()
    if before is None:
        pytest.skip("this kernel does not tell")
    assert 0.0 <= before <= (waited_for_cores() or 0.0)


AWAKE = """
import json, sys, time
from sbkit.base.thread_waiting import SecondTeam, prepare_waiting
assert prepare_waiting()
import torch
import sentencepiece  # has an OpenMP of its own, which is not the one to switch
numbers, team = torch.ones(1 << 20), SecondTeam()

def awake():  # share of 20 ms after an operation in which its second thread is still running
    shares = []
    for _ in range(9):
        numbers.add_(1)
        started, worked = time.perf_counter(), time.process_time()
        time.sleep(0.02)
        shares.append((time.process_time() - worked) / (time.perf_counter() - started))
        time.sleep(0.1)
    return sorted(shares)[4]

told = [awake()]
team.sleep()
told.append(awake())
team.spin()
time.sleep(0.2)
told.append(awake())
print(json.dumps(told))
"""


@pytest.mark.skipif(affine_cores() < 2, reason="one core: no thread waits")
def test_a_second_team_stops_the_spinning_and_its_end_starts_it_again() -> None:
    quiet = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", AWAKE],
        cwd=ROOT,
        env={**quiet, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    before, asleep, after = json.loads(done.stdout)
    assert asleep < 0.1 < 0.25 < min(before, after), (before, asleep, after)
