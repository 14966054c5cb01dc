"""Which shard of a folder holds the audio of a clip."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sbkit.audio.io import AudioError
from sbkit.data.shard import ClipKey, Shard, is_intact, list_shards


class CachedAudio(NamedTuple):
    """Where the audio of a clip lies, its length in samples, and a hash of the clip's file."""

    file: str
    row: int
    samples: int
    digest: str


Outcome = CachedAudio | AudioError


@dataclass
class ShardSearch:
    """The clips that are wanted, by their paths, and where they are; each listing is read once.

    Attributes:
        found: the clips that are there, or that are known to be unreadable.
        damaged: listings of shards that are not what was written, among those needed.
    """

    folder: Path
    wanted: Mapping[str, ClipKey]
    found: dict[ClipKey, Outcome] = field(default_factory=dict)
    damaged: list[Path] = field(default_factory=list)
    _read: set[Path] = field(default_factory=set)

    def look(self) -> None:
        """Read the listings that are new."""
        for listing, shard in list_shards(self.folder, besides=self._read):
            self._read.add(listing)
            if shard is None:
                self.damaged.append(listing)
            else:
                self.add(shard)

    def add(self, shard: Shard) -> None:
        """Note what is wanted of a shard, unless it is damaged."""
        here = _located(shard, self.wanted)
        new = {key: place for key, place in here.items() if key not in self.found}
        if new and not is_intact(shard):
            self.damaged.append(shard.file.with_suffix(".json"))
            return
        self.found |= new
        for bad in shard.unreadable:
            if self.wanted.get(bad.key.path) == bad.key:
                self.found.setdefault(bad.key, AudioError(bad.reason, bad.detail))

    def missing(self) -> list[ClipKey]:
        """List the clips that are not found, in the order in which they are wanted."""
        return [key for key in self.wanted.values() if key not in self.found]


def _located(shard: Shard, wanted: Mapping[str, ClipKey]) -> dict[ClipKey, Outcome]:
    """Return where the clips that are wanted lie in a shard."""
    found: dict[ClipKey, Outcome] = {}
    file, lookup = str(shard.file), wanted.get
    for row, (path, size, mtime, samples, digest) in enumerate(zip(*shard.clips, strict=True)):
        key = lookup(path)
        if key is not None and key.size == size and key.mtime_ns == mtime:
            found[key] = CachedAudio(file, row, samples, digest)
    return found
