"""How much memory is free for this process, which in a container is less than the machine has."""

from collections.abc import Sequence
from pathlib import Path

from sbkit.base.cores import cgroups

MEMINFO = Path("/proc/meminfo")


def available_memory(meminfo: Path = MEMINFO, groups: Sequence[Path] | None = None) -> int | None:
    """Return the bytes that the system and version 2 cgroups leave; None where no one tells."""
    groups = cgroups() if groups is None else groups
    left = [_left(each) for each in groups] + [_read(meminfo, "MemAvailable:", unit=1024)]
    return min((each for each in left if each is not None), default=None)


def _left(group: Path) -> int | None:
    """Return what a group may take beyond what it has, cached files not counted."""
    limit, taken = (_read(group / f"memory.{name}") for name in ("max", "current"))
    if limit is None or taken is None:
        return None
    cached = _read(group / "memory.stat", "inactive_file")
    return max(0, limit - taken + (cached or 0))


def _read(file: Path, name: str = "", unit: int = 1) -> int | None:
    """Return the number behind a name in a file, or the first one in it; None where none is."""
    try:
        lines = map(str.split, file.read_text().splitlines())
        found = next(each for each in lines if not name or each[0] == name)
        return unit * int(found[1 if name else 0])
    except (OSError, ValueError, IndexError, StopIteration):  # `max` is no limit
        return None
