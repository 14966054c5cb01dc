"""The cores and the memory that this process may use, and the name of the processor."""

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
MEMORY_INFO = Path("/proc/meminfo")


def usable_cores() -> int:
    """Count the cores that the affinity and the quota of version 2 cgroups allow, at least one.

    `os.cpu_count()` counts the cores of the machine: for a job with 2 of 128 cores it returns 128.
    """
    limits = (file.read_text().split() for file in _cgroup_files("cpu.max"))  # in microseconds
    quotas = [int(quota) // int(period) for quota, period in limits if quota != "max"]
    return max(1, min([affine_cores(), *quotas]))


def affine_cores() -> int:
    """Count the cores that this process may be scheduled on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def available_memory() -> int:
    """Return the most bytes that this process could allocate; `sys.maxsize` without /proc."""
    limits = (file.read_text().strip() for file in _cgroup_files("memory.max"))
    byte_limits = [int(limit) for limit in limits if limit != "max"]
    if MEMORY_INFO.exists():
        free = re.search(r"^MemAvailable: +(\d+) kB$", MEMORY_INFO.read_text(), re.MULTILINE)
        byte_limits += [1024 * int(free[1])] if free else []
    return min(byte_limits, default=sys.maxsize)


def _cgroup_files(name: str) -> Iterator[Path]:
    """Yield the files of that name in this process's version 2 cgroup and its parents.

    Inside a container the process's own group appears as the root.
    """
    membership = CGROUP_OF_PROCESS.read_text() if CGROUP_OF_PROCESS.exists() else ""
    if path := re.search(r"^0::/(.*)$", membership, re.MULTILINE):
        group = CGROUPS / path[1]
        yield from filter(Path.exists, (parent / name for parent in (group, *group.parents)))


def cpu_name() -> str:
    """Return the processor's model name from Linux, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
