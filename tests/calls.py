"""Record the calls of a function, and the audio files that processes open."""

import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest


def note_calls(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, note: Callable[..., Any]
) -> list[Any]:
    """Return a list of what ``note`` makes of the positional arguments of each later call."""
    notes: list[Any] = []
    function = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        notes.append(note(*arguments))
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return notes


# The processes that tests start, and those that these start, run this as well.
NOTE_READS = """
import os, sys
def note(event, arguments):
    log = os.environ.get("NOTED_READS")
    if log and event == "open" and str(arguments[0]).endswith(".wav"):
        with open(log, "a") as file:
            file.write(f"{arguments[0]}\\n")
if not hasattr(sys, "reads_are_noted"):
    sys.addaudithook(note)
sys.reads_are_noted = True
"""


@cache
def note_reads() -> None:
    exec(NOTE_READS, {})  # a hook that cannot be taken out again


class Reads:
    """Counts of the WAV files that this process, and those it starts, open from now on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log = folder / "reads"
        self._log.touch()
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(NOTE_READS)
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        monkeypatch.setenv("NOTED_READS", str(self._log))
        note_reads()

    def take(self) -> Counter[str]:
        """Return how often each file was opened since the last call, by its name."""
        counts = Counter(Path(line).name for line in self._log.read_text().splitlines())
        self._log.write_text("")
        return counts
