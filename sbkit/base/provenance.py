"""Where figures come from: versions of packages, commit of the code, the processor."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")
PACKAGES = ("torch", "torchaudio", "speechbrain", "datasets", "sentencepiece", "numpy", "sbkit")


def versions(more: Sequence[str] = ()) -> dict[str, str | None]:
    """Return the versions of Python and of the packages that a run rests on, None if absent."""
    packages = (*PACKAGES, *more)
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def git_commit(folder: Path) -> str | None:
    """Name the commit that ``folder`` is checked out from, with "-dirty" if tracked files changed.

    None outside a checkout, and for a folder that a checkout merely contains, untracked.
    """
    if _git(folder, "ls-files", "--error-unmatch", ".") is None:
        return None
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def cpu_name() -> str:
    """Name the processor as Linux does, or at least its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    # git sets them for its hooks, and they name another checkout than that of the folder.
    own = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
