"""The limits of a container count as cores and memory."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sbkit.base import machine
from sbkit.base.machine import available_memory, read_driver, usable_cores

DRIVER_CODE = """
int cuInit(int flags) { return ERROR; }
int cuDriverGetVersion(int *version) { *version = 12020; return 0; }
int cuDeviceGetCount(int *count) { *count = GPUS; return 0; }
int cuGetErrorString(int code, char **text) { *text = "no device"; return 0; }
"""


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend to be in a cgroup of two levels, on a machine of eight cores."""
    (tmp_path / "jobs" / "mine").mkdir(parents=True)
    (tmp_path / "cgroup").write_text("4:memory:/old\n0::/jobs/mine\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "CGROUP_OF_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"": "max 100000", "jobs": "400000 100000", "jobs/mine": "max 100000"}, 4),
        ({"jobs": "400000 100000", "jobs/mine": "50000 100000"}, 1),
        ({}, 8),
    ],
)
def test_usable_cores_obey_tightest_quota_of_group_and_parents(
    cgroups: Path, limits: dict[str, str], cores: int
) -> None:
    for group, limit in limits.items():
        (cgroups / group / "cpu.max").write_text(limit + "\n")
    assert usable_cores() == cores


def test_limits_of_cgroups_of_version_1_are_obeyed(cgroups: Path) -> None:
    (cgroups / "cgroup").write_text("4:memory:/docker/1f\n3:cpu,cpuacct:/jobs\n0::/\n")
    for group in ("memory", "cpu/jobs"):  # in a container, its own group appears as the root
        (cgroups / group).mkdir(parents=True)
    (cgroups / "memory/memory.limit_in_bytes").write_text("900\n")
    (cgroups / "memory/memory.usage_in_bytes").write_text("500\n")
    (cgroups / "memory/memory.stat").write_text("inactive_file 10\ntotal_inactive_file 200\n")
    for quota, cores in ((300_000, 3), (-1, 8)):
        (cgroups / "cpu/jobs/cpu.cfs_quota_us").write_text(f"{quota}\n")
        (cgroups / "cpu/jobs/cpu.cfs_period_us").write_text("100000\n")
        assert usable_cores() == cores
    assert available_memory() == 900 - (500 - 200)


@pytest.mark.parametrize(
    ("limits", "free"), [({"jobs": "900", "jobs/mine": "max"}, 600), ({}, 2048000)]
)
def test_available_memory_obeys_tightest_limit(
    cgroups: Path, limits: dict[str, str], free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group, limit in limits.items():
        (cgroups / group / "memory.max").write_text(limit + "\n")
        (cgroups / group / "memory.current").write_text("300\n")
    (cgroups / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   2000 kB\n")
    monkeypatch.setattr(machine, "MEMORY_INFO", cgroups / "meminfo")
    assert available_memory() == free


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_driver_tells_versions_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "KERNEL_MODULE", tmp_path / "version")
    monkeypatch.setattr(machine, "DRIVER", str(tmp_path / "missing"))
    assert read_driver() is None
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Module  535.104.05  Sat")
    assert read_driver() is not None  # as in a container without its GPUs
    for number, (gpus, error, name, cuda, failure) in enumerate(
        [
            (2, 0, "cuInit", "12.2", "^$"),
            (0, 0, "cuInit", "12.2", "no device"),
            (2, 9, "cuInit", "12.2", "no device"),
            (2, 0, "another", "", "undefined symbol: cuInit"),
        ]
    ):
        library = tmp_path / f"{number}.so"
        values = [f"-DGPUS={gpus}", f"-DERROR={error}", f"-DcuInit={name}"]
        command = ["cc", *values, "-shared", "-fPIC", "-xc", "-", "-o", library]
        subprocess.run(command, input=DRIVER_CODE, text=True, check=True)
        monkeypatch.setattr(machine, "DRIVER", str(library))
        driver = read_driver()
        assert driver and (driver.version, driver.cuda) == ("535.104.05", cuda)
        assert re.search(failure, driver.failure)
