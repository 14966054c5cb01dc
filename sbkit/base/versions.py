"""The versions and the commit that produced a result."""

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sbkit.base.errors import SbkitError

__version__ = "0.1.0"  # of sbkit; setup.cfg reads it here

TEXT_PACKAGES = ("num2words", "regex", "pyarrow")
AUDIO_PACKAGES = ("av", "soundfile", "soxr")
AUDIO_MODULES = (
    *("audio/channels", "audio/containers", "audio/decode", "audio/io"),
    *("base/units", "data/clip_decoding", "data/shard"),
)
PACKAGES = ("torch", "torchaudio", "speechbrain", "datasets", "sentencepiece", "numpy", "sbkit")


def versions(more_packages: Sequence[str] = ()) -> dict[str, str | None]:
    """Return the versions of Python and of the packages that a run needs; None if not installed."""
    packages = (*PACKAGES, *more_packages)
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


@cache
def code_identity() -> str:
    """Hash the code of sbkit and of the recipes, with the versions of packages that they use."""
    packages = (*PACKAGES, *TEXT_PACKAGES, *AUDIO_PACKAGES)
    return hash_code(packages, ("sbkit/**/*.py", "sbkit/text/*.toml", "recipes/**/*.py"))


@cache
def audio_identity() -> str:
    """Hash the code that decodes and stores audio, with the versions of its packages."""
    return hash_code(AUDIO_PACKAGES, [f"sbkit/{name}.py" for name in AUDIO_MODULES])


def hash_code(packages: Sequence[str], patterns: Sequence[str]) -> str:
    """Hash files of sbkit and of the recipes, with the versions of packages that they use."""
    digest = hashlib.sha256(repr([(name, _version(name)) for name in packages]).encode())
    package = Path(__file__).parents[1]
    roots = (package.parent, package / "project")  # in a wheel, the recipes are in the second
    for pattern in patterns:
        files = sorted(file for root in roots for file in root.glob(pattern))
        if not files:
            raise SbkitError(f"sbkit has no file {pattern}. Install it again.")
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def describe_versions() -> str:
    """Return the version of sbkit, with those of Python and of the packages that a run needs."""
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
