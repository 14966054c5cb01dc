"""The cores and the memory that this process may use, and the processor's name."""

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ONNX = "onnx"
PRECISIONS = {"torch": ("fp32", "bf16", "fp16"), ONNX: ("fp32", "int8")}  # of each runtime
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
MEMORY_INFO = Path("/proc/meminfo")
SHARED_MEMORY = Path("/dev/shm")  # where workers put their batches; 64 MB in Docker
# What makes workers fail, or wait forever
SHORTAGES = f"{SHARED_MEMORY} or TMPDIR may be full, or too many files open (ulimit -n)."


def usable_cores() -> int:
    """Count the cores that the affinity and the quotas of cgroups allow, at least one.

    `os.cpu_count()` counts the cores of the machine: for a job with 2 of 128 cores it returns 128.
    """
    limits = (file.read_text().split() for file in _cgroup_files("cpu.max"))  # in microseconds
    quotas = [int(quota) // int(period) for quota, period in limits if quota != "max"]
    for file in _cgroup_files("cpu.cfs_quota_us", controller="cpu"):
        quota = int(file.read_text())  # -1 if there is none
        if quota > 0:
            quotas.append(quota // int(file.with_name("cpu.cfs_period_us").read_text()))
    return max(1, min([allowed_cores(), *quotas]))


def allowed_cores() -> int:
    """Count the cores that this process may be scheduled on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def available_memory() -> int:
    """Return the most bytes that this process could allocate; `sys.maxsize` without /proc."""
    files = [
        *_cgroup_files("memory.max"),
        *_cgroup_files("memory.limit_in_bytes", controller="memory"),
    ]
    limits = (file.read_text().strip() for file in files)
    byte_limits = [int(limit) for limit in limits if limit != "max"]
    if MEMORY_INFO.exists():
        free = re.search(r"^MemAvailable: +(\d+) kB$", MEMORY_INFO.read_text(), re.MULTILINE)
        byte_limits += [1024 * int(free[1])] if free else []
    return min(byte_limits, default=sys.maxsize)


def _cgroup_files(name: str, *, controller: str = "") -> Iterator[Path]:
    """Yield the files of that name in this process's cgroup and its parents.

    Inside a container the process's own group appears as the root.

    controller: of version 1, which has a tree of groups for each; "" for version 2.
    """
    membership = CGROUP_OF_PROCESS.read_text() if CGROUP_OF_PROCESS.exists() else ""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = CGROUPS / controller / path.lstrip("/")
            yield from filter(Path.exists, (parent / name for parent in (group, *group.parents)))


def cpu_name() -> str:
    """Return the processor's model name from Linux, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
