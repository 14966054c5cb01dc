"""The versions and the commit that produced a result."""

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__version__ = "0.1.0"  # of sbkit; setup.cfg reads it here

TEXT_PACKAGES = ("num2words", "regex", "pyarrow")
AUDIO_PACKAGES = ("av", "soundfile", "soxr", "G722")
PACKAGES = ("torch", "torchaudio", "speechbrain", "datasets", "sentencepiece", "numpy", "sbkit")


def versions(more_packages: Sequence[str] = ()) -> dict[str, str | None]:
    """Return the versions of Python and of the packages that a run needs; None if not installed."""
    packages = (*PACKAGES, *more_packages)
    return {"python": platform.python_version()} | package_versions(packages)


def data_versions() -> dict[str, Any]:
    """Return the versions of Python, and of packages that decode audio or read rows and texts."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "packages": package_versions((*AUDIO_PACKAGES, *TEXT_PACKAGES))}


def package_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the version of each package, None if it is not installed."""
    return {name: _version(name) for name in packages}


def library_version() -> str:
    """Return the version of sbkit, with its commit in a checkout."""
    commit = git_commit(Path(__file__).parent)
    return f"{__version__} ({commit[:8]})" if commit else __version__


def describe_versions() -> str:
    """Name the versions of sbkit, Python and the packages that a run needs."""
    packages = [f"{name} {version}" for name, version in versions().items() if name != "sbkit"]
    return f"sbkit {__version__} ({', '.join(packages)})"


def _version(package: str) -> str | None:
    # Each command imports this file, and this would be a tenth of its start.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """Return the commit of a checkout, with "-dirty" if tracked files have changed.

    None for a folder outside a checkout, and for one inside it that git does not track.
    """
    if _git(folder, "ls-files", "--error-unmatch", ".") is None:
        return None
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
