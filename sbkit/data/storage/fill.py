"""Which clips are in the cache, and decoding of those that are not, by one process or by many.

Clips are decoded in blocks, each by the process that holds its lock file, into shards of its own.
Whoever comes later takes the blocks that nobody has, and waits for the others in the end. A process
that is killed loses what it decoded since its last record batch: at most 100 clips, or 16 MB.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sbkit.audio.io import AudioError
from sbkit.base.errors import SbkitError
from sbkit.base.files import nearest_existing, try_lock
from sbkit.data.storage.decode import Decoded, DecodingProgress, decode_clips
from sbkit.data.storage.shard import (
    CLAIM,
    CachedClip,
    ClipKey,
    Shard,
    ShardWriter,
    UnreadableClip,
    is_intact,
    list_shards,
)
from sbkit.logs.log import say

BLOCK = 1000  # clips; of 5 s at 16 kHz they are 160 MB
SHARD_BYTES = 200_000_000  # of audio, 1.7 h at 16 kHz; a longer clip has a shard of its own
TRIED = 100  # clips, by which the room for all others is estimated
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


@dataclass(frozen=True)
class Place:
    """Where the clips of a corpus lie, and where and as what their audio is kept.

    corpus: the folder that their paths are relative to; sample_rate: in Hz; store: as
    `sbkit.data.storage.audio_store` names it; folder: of the shards.
    """

    corpus: Path
    sample_rate: int
    store: str
    folder: Path


def fill(place: Place, search: ShardSearch, *, title: str) -> None:
    """Decode what a search has not found; what is finished stays, whatever happens.

    Raises:
        SbkitError: the disk is full.
        OSError: the folder cannot be written to.
    """
    missing = search.missing()
    if not missing:
        return
    every = list(search.wanted.values())
    blocks = [every[start : start + BLOCK] for start in range(0, len(every), BLOCK)]
    gone = set(missing)
    blocks = [block for block in blocks if not gone.isdisjoint(block)]
    with DecodingProgress(len(missing), title, place.sample_rate) as progress:
        filling = _Filling(place, search, missing, progress)
        held = [block for block in blocks if not filling.decode(block, wait=False)]
        if held:
            say(f"Another process prepares {place.corpus}; waiting for it.")
        for block in held:
            filling.decode(block, wait=True)


class _Filling:
    """One process's share of the work."""

    def __init__(
        self,
        place: Place,
        search: ShardSearch,
        missing: Sequence[ClipKey],
        progress: DecodingProgress,
    ) -> None:
        self._place, self._search = place, search
        self._missing, self._progress = missing, progress
        self._written = 0  # bytes
        self._tried = 0  # bytes of the files that they are of

    def decode(self, block: Sequence[ClipKey], *, wait: bool) -> bool:
        """Decode a block, less what others have done; return False where another has it."""
        name = f"{block[0].path}\0{block[-1].path}"
        with claimed(self._place.folder, name, wait=wait) as mine:
            if mine:
                self._search.look()
                self._decode([key for key in block if key not in self._search.found])
        return mine

    def _decode(self, keys: Sequence[ClipKey]) -> None:
        if not keys:
            return
        writer = self._new_writer()
        try:
            paths = [self._place.corpus / key.path for key in keys]
            decoding = decode_clips(paths, self._place.sample_rate, store=self._place.store)
            for key, decoded in zip(keys, decoding, strict=True):
                size = len(decoded.audio) if isinstance(decoded.audio, bytes) else 0
                if writer.audio.bytes and writer.audio.bytes + size > SHARD_BYTES:
                    self._search.add(writer.finish())
                    writer = self._new_writer()
                self._write(writer, key, decoded)
                self._written += size
                self._tried += key.size
                self._progress.advance(decoded)
                if self._progress.done == TRIED:
                    self._require_room()
            self._search.add(writer.finish())
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C; SIGTERM, as `run_main` has it
            # It may have come within a row: without its stamp, the rows are counted next time.
            writer.finish().file.with_suffix(".ok").unlink(missing_ok=True)
            raise
        except OSError as error:
            if error.errno in DISK_FULL:
                raise self._full() from error
            raise
        finally:
            writer.discard()

    def _new_writer(self) -> ShardWriter:
        return ShardWriter(self._place.folder, self._place.store)

    def _write(self, writer: ShardWriter, key: ClipKey, decoded: Decoded) -> None:
        """Add one clip; what may be readable tomorrow is not noted as unreadable."""
        if not isinstance(decoded.audio, AudioError):
            writer.add(CachedClip(key, decoded.samples, decoded.digest), decoded.audio)
            return
        self._search.found[key] = decoded.audio
        if decoded.audio.reason not in ("missing", "unreachable"):
            bad = UnreadableClip(key, decoded.audio.reason, str(decoded.audio))
            writer.unreadable.append(bad)

    def _require_room(self) -> None:
        """Foretell from the first clips what the others will take; raises SbkitError."""
        rest = sum(key.size for key in self._missing) - self._tried
        needed = self._written / max(1, self._tried) * rest
        if needed > shutil.disk_usage(self._place.folder).free:
            raise disk_full(
                self._place.folder,
                f"is too small: by the first {TRIED} of {len(self._missing)} clips, the others "
                f"need about {needed / 1e9 + 0.05:.1f} GB more",
            )

    def _full(self) -> SbkitError:
        done, total = self._progress.done, len(self._missing)
        needed = self._written / max(1, done) * total - self._written
        return disk_full(
            self._place.folder,
            f"is full after {done} of {total} clips; the rest needs about "
            f"{needed / 1e9 + 0.1:.1f} GB more",
        )


@contextmanager
def claimed(folder: Path, work: str, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of some work, by its name; yield whether it is held.

    A disk without locks has one process.
    """
    file = folder / f"{CLAIM}{hashlib.sha256(work.encode()).hexdigest()[:16]}"
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        mine = try_lock(lock)
        if not mine and wait:
            fcntl.flock(lock, fcntl.LOCK_EX)
            mine = True
        yield mine
        if mine:
            file.unlink(missing_ok=True)
    finally:
        os.close(lock)


def disk_full(folder: Path, state: str) -> SbkitError:
    """Return the error of a disk without room, ``state`` saying how far it went."""
    free = shutil.disk_usage(nearest_existing(folder)).free / 1e9
    return SbkitError(
        f"The disk of {folder} must have room for prepared audio, but {state} "
        f"({free:.1f} GB are free). Free some, with `sbkit cache prune` or by hand, let "
        "SBKIT_CACHE name a folder on another disk, or keep less: --audio_store=flac, or none. "
        "The shards that are finished stay, and the same command goes on from there."
    )
