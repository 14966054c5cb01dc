"""How many cores this process may use, which in a container are fewer than the machine has."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Count the cores that affinity and the quota of version 2 cgroups leave, at least one.

    `os.cpu_count()` counts those of the machine: of a job with 2 of 128 cores it says 128.
    """
    affine, quota = affine_cores(), cgroup_quota(CGROUPS, MEMBERSHIP)
    return affine if quota is None else max(1, min(affine, int(quota)))


def affine_cores() -> int:
    """Count the cores that this process may be scheduled on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # no Linux
        return os.cpu_count() or 1


def cgroup_quota(root: Path, membership: Path) -> float | None:
    """Return how many cores' time the cgroups of this process allow; None where none limits it.

    The limit of every group above counts, too. Inside a container its own group is the root.
    """
    limits = [_limit(each / "cpu.max") for each in cgroups(root, membership)]
    return min((each for each in limits if each is not None), default=None)


def cgroups(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[Path]:
    """Return the folders of the version 2 cgroup of this process, and of all above it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    inner = next((each[len("0::/") :] for each in lines if each.startswith("0::/")), "")
    group = root / inner
    return [group, *group.parents]


def _limit(file: Path) -> float | None:
    """Read microseconds of all cores' time and of the period: ``200000 100000`` are two cores."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
