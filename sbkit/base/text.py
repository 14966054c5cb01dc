"""Text for people: numbers and names, characters that move no cursor, versions and commits."""

import json
import platform
import subprocess
import unicodedata
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__version__ = "0.1.0"  # of sbkit, in its only place

SHOWN = 3  # names, unless a sentence has room for more
JOINERS = "\u200c\u200d"  # invisible, and part of words in Persian and Hindi
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
PACKAGES = ("torch", "torchaudio", "speechbrain", "datasets", "sentencepiece", "numpy", "sbkit")


def plural(count: int, word: str, words: str = "") -> str:
    """Write a number of things: "1 row", "2 rows"; words: the plural, if it is irregular."""
    return f"{count:,} {word if count == 1 else words or f'{word}s'}"


def listed(names: Iterable[object], *, most: int = SHOWN, by: str = ", ") -> str:
    """Write the first names of several, and how many more there are: "a, b, c and 2 more"."""
    every = list(map(str, names))
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return by.join(every[:most]) + more


def printable(text: str) -> str:
    r"""Escape control characters, line ends and changes of direction: ESC becomes ``\x1b``.

    Names and transcripts of others are printed: an escape sequence could clear the screen.
    """
    return "".join(_escaped(each) if _is_hidden(each) else each for each in text)


def printable_json(text: str) -> str:
    r"""Escape in JSON what `printable` does, but its own line ends: ESC stays ``\u001b``."""
    return "".join(json.dumps(c)[1:-1] if c != "\n" and _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in HIDDEN and character not in JOINERS


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def versions(more: Sequence[str] = ()) -> dict[str, str | None]:
    """Return the versions of Python and of the packages that a run rests on, None if absent."""
    packages = (*PACKAGES, *more)
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """Return the commit that ``folder`` is checked out from, "-dirty" if tracked files changed.

    None outside a checkout, and for a folder that a checkout contains but does not track.
    """
    if _git(folder, "ls-files", "--error-unmatch", ".") is None:
        return None
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cpu_name() -> str:
    """Return the processor's name as Linux has it, or at least its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
