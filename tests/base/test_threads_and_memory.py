"""Threads sleep while other processes need the cores; freed memory is kept by default."""

import json
import os
import subprocess
import sys
import threading

import pytest

from sbkit.base.machine import allowed_cores
from sbkit.base.threads_and_memory import (
    OPENMP_SETTINGS,
    SpinSwitch,
    can_start_threads,
    prepare_waiting,
    seconds_without_core,
)
from tests.runs import ROOT
from tests.shortage import NO_THREAD, refusing


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Start from an environment that sets nothing for threads, and restore it afterwards."""
    for name in (*OPENMP_SETTINGS, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("settings", "decides"),
    [
        ({}, True),
        (OPENMP_SETTINGS, True),
        ({"OMP_WAIT_POLICY": "passive"}, False),
        ({"OMP_NUM_THREADS": "1"}, False),
    ],
)
def test_settings_of_user_are_kept(
    settings: dict[str, str], decides: bool, variables: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        variables.setenv(name, value)
    assert prepare_waiting() is decides


def test_container_with_fewer_cores_gets_fewer_threads(variables: pytest.MonkeyPatch) -> None:
    variables.setattr("sbkit.base.threads_and_memory.allowed_cores", lambda: 8)
    variables.setattr("sbkit.base.threads_and_memory.usable_cores", lambda: 2)
    prepare_waiting()
    assert os.environ["OMP_NUM_THREADS"] == "2"
    variables.setenv("OMP_NUM_THREADS", "3")
    prepare_waiting()
    assert os.environ["OMP_NUM_THREADS"] == "3"


TEAMS = """
import ctypes, json, os, time
from sbkit.base.threads_and_memory import *
assert prepare_waiting()
import torch
import sentencepiece  # brings another OpenMP, which must not be switched
torch.ones(1 << 20).add_(1)
team = SpinSwitch()

def threads(is_expected=lambda count: True):
    for _ in range(600):
        count = len(os.listdir("/proc/self/task"))
        if is_expected(count):
            break
        time.sleep(0.1)
    return count

before = threads()
team.sleep()
asleep = threads()
team.spin()
after = threads(lambda count: count < asleep)
print(json.dumps([loaded_library()._name, before, asleep, after, seconds_without_core()]))
"""


@pytest.mark.skipif(allowed_cores() < 2, reason="one core: no thread waits")
@pytest.mark.skipif(seconds_without_core() is None, reason="this kernel does not report it")
def test_second_team_has_more_threads_than_processors_until_it_ends() -> None:
    """More threads than processors make GNU OpenMP stop spinning."""
    variables = {name: value for name, value in os.environ.items() if name not in OPENMP_SETTINGS}
    variables["OMP_NUM_THREADS"] = "2"
    command = [sys.executable, "-c", TEAMS]
    output = subprocess.check_output(command, cwd=ROOT, env=variables, timeout=120)
    library, before, asleep, after, waited = json.loads(output)
    assert "/torch" in library
    assert asleep > before + allowed_cores() and after < asleep
    assert waited >= 0


@pytest.mark.usefixtures("variables")
def test_openmp_starts_no_second_team_under_a_limit_on_threads() -> None:
    """OpenMP would end the process: "libgomp: Thread creation failed"."""
    assert can_start_threads(2)
    before = threading.active_count()
    with refusing("threading.Thread.start", NO_THREAD, after=2):
        assert not can_start_threads(3)
    assert threading.active_count() == before
    with refusing("threading.Thread.start", NO_THREAD), SpinSwitch() as switch:
        switch.sleep()  # torch has loaded OpenMP
        assert threading.active_count() == before


FAULTS = """
import resource, sys
from sbkit.base.threads_and_memory import keep_freed_memory
keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (5, 20, 11, 30):
        buffers = [b"x" * (size << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize(
    ("variables", "is_kept"), [({}, True), ({"MALLOC_MMAP_THRESHOLD_": "100000"}, False)]
)
def test_freed_memory_maps_its_pages_once(variables: dict[str, str], is_kept: bool) -> None:
    command = [sys.executable, "-c", FAULTS]
    faults = int(subprocess.check_output(command, cwd=ROOT, env=variables))
    assert (faults < 1000) is is_kept  # of 50,000 pages
