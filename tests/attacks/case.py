"""One attack: a folder made hostile, and the command that a user would give."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The folder of one attack: a healthy bundle, run and clip of its own, to be spoiled.

    canary: what no command may make.
    """

    folder: Path

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def clip(self) -> Path:
        return self.folder / "clip.wav"

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    @property
    def trained(self) -> Path:
        """Return the folder of a run that was trained for an epoch."""
        return self.folder / "trained"

    @property
    def mine(self) -> Path:
        """Return a folder with `kept.txt`, of which nothing may change."""
        return self.folder / "mine"

    def transcribe(self) -> list[str]:
        return ["transcribe", str(self.bundle), str(self.clip)]

    def export(self) -> list[str]:
        return ["export", str(self.run), "--out", str(self.folder / "out")]

    def replay(self) -> list[str]:
        return ["replay", str(self.run / "nonfinite" / "1.json")]


@dataclass(frozen=True)
class Case:
    """Spoil a place, and return the command: arguments of `sbkit`, or a name of `inputs.COMMANDS`.

    harmless: whether the command may also do its work, since what was changed does no harm.
    """

    group: str
    name: str
    prepare: Callable[[Place], list[str]]
    harmless: bool = False
