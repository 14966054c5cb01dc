"""A container's limits count, freed memory is kept, threads sleep while others need the cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sbkit.base import machine
from sbkit.base.machine import (
    BUSY,
    QUIET_LOOKS,
    SETTINGS,
    ThreadWaiting,
    affine_cores,
    available_memory,
    describe_waiting,
    prepare_waiting,
    usable_cores,
    waited_for_cores,
)
from tests.runs import ROOT


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend to be in a cgroup of two levels, on a machine of eight cores."""
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "cgroup").write_text("4:memory:/old\n0::/jobs/mine\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"": "max 100000", "jobs": "400000 100000", "jobs/mine": "max 100000"}, 4),
        ({"jobs": "400000 100000", "jobs/mine": "50000 100000"}, 1),
        ({"jobs/mine": "max 100000"}, 8),
        ({}, 8),
    ],
)
def test_the_tightest_quota_of_all_groups_above_counts(
    groups: Path, limits: dict[str, str], cores: int
) -> None:
    for group, limit in limits.items():
        (groups / group / "cpu.max").write_text(limit + "\n")
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({"": "max", "jobs": "900", "jobs/mine": "max"}, 900),
        ({"jobs": "9000000"}, 2048000),
        ({}, 2048000),
    ],
)
def test_the_tightest_limit_of_memory_counts(
    groups: Path, limits: dict[str, str], free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group, limit in limits.items():
        (groups / group / "memory.max").write_text(limit + "\n")
    (groups / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   2000 kB\n")
    monkeypatch.setattr(machine, "MEMORY", groups / "meminfo")
    assert available_memory() == free


FAULTS = """
import resource, sys
from sbkit.base.machine import describe_allocator, keep_freed_memory
keep_freed_memory()
print(describe_allocator())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (5, 20, 11, 30):
        kept = [b"x" * (size << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_pages_are_mapped_once() -> None:
    described, faults = _answers()
    assert described == "freed memory is kept"
    assert int(faults) < 1000  # of 50,000 pages
    described, faults = _answers(MALLOC_MMAP_THRESHOLD_="100000")
    assert described == "memory is allocated as MALLOC_MMAP_THRESHOLD_ has it"
    assert int(faults) > 10_000


def _answers(**variables: str) -> list[str]:
    """Run FAULTS in a process of its own."""
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Start from an environment that says nothing of threads, and restore that of the test."""
    for name in (*SETTINGS, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "decides", "described"),
    [
        ({}, True, "4 threads, which sleep between operations while others need the cores"),
        (SETTINGS, True, "4 threads, which sleep between operations while others need the cores"),
        ({"OMP_WAIT_POLICY": "passive"}, False, "4 threads, which wait as OMP_WAIT_POLICY=passive"),
        ({"OMP_NUM_THREADS": "1"}, False, "4 threads, which wait as OpenMP does by itself"),
    ],
)
def test_what_the_user_has_set_is_left_alone(
    given: dict[str, str], decides: bool, described: str, variables: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        variables.setenv(name, value)
    assert prepare_waiting() is decides
    assert describe_waiting(4) == described
    assert describe_waiting(1) == "one thread"


def test_a_container_with_fewer_cores_has_fewer_threads(variables: pytest.MonkeyPatch) -> None:
    variables.setattr("sbkit.base.machine.affine_cores", lambda: 8)
    variables.setattr("sbkit.base.machine.usable_cores", lambda: 2)
    prepare_waiting()
    assert os.environ["OMP_NUM_THREADS"] == "2"
    variables.setenv("OMP_NUM_THREADS", "3")
    prepare_waiting()
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_threads_sleep_at_once_and_spin_again_when_it_has_been_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("sleep", "spin"):
        monkeypatch.setattr(ThreadWaiting, name, lambda self, name=name: calls.append(name))
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


TEAMS = """
import ctypes, json, os, time
from sbkit.base.machine import *
assert prepare_waiting()
import torch
import sentencepiece  # has an OpenMP of its own, which is not the one to switch
torch.ones(1 << 20).add_(1)
team = ThreadWaiting()

def threads(enough=lambda count: True):
    for _ in range(600):
        count = len(os.listdir("/proc/self/task"))
        if enough(count):
            break
        time.sleep(0.1)
    return count

before = threads()
team.sleep()
asleep = threads()
team.spin()
after = threads(lambda count: count < asleep)
print(json.dumps([loaded_library()._name, before, asleep, after, waited_for_cores()]))
"""


@pytest.mark.skipif(affine_cores() < 2, reason="one core: no thread waits")
@pytest.mark.skipif(waited_for_cores() is None, reason="this kernel does not tell")
def test_a_second_team_has_more_threads_than_processors_until_it_ends() -> None:
    """Which is what makes GNU OpenMP stop spinning, and spin again."""
    quiet = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", TEAMS],
        cwd=ROOT,
        env={**quiet, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    library, before, asleep, after, waited = json.loads(done.stdout)
    assert "/torch" in library
    assert asleep > before + affine_cores() and after < asleep
    assert waited >= 0
