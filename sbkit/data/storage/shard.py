"""Shards: Arrow files of decoded audio, each with a listing of its clips and its checksum.

NAME.arrow  what `audio_store` keeps of the clips, a row each
NAME.json   which clips they are, how long each is, which cannot be read, and the checksums
NAME.ok     size, times and inode of NAME.arrow when its checksum was found right
"""

import hashlib
import io
import json
import os
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sbkit.base.errors import SbkitError
from sbkit.base.files import fsync, naming, read_regular, write_text_atomically
from sbkit.checkpoint.integrity import checksum

BATCH_BYTES = 16_000_000  # of audio in a record batch, whose values must stay below 2 GB
BATCH_ROWS = 100
LARGEST_LISTING = 1 << 28  # bytes
NOTE = ".json.tmp"  # ends the name of what is noted of an unfinished shard
CLAIM = ".claim-"  # the lock file of who decodes a block of clips
CORPUS_FILE = "corpus.json"  # in a folder of shards: whose audio they hold
AUDIO_SCHEMA = pa.schema({"audio": pa.binary()})


class ClipKey(NamedTuple):
    """One state of an audio file; ``path`` is relative to the corpus folder."""

    path: str
    size: int
    mtime_ns: int


class CachedClip(NamedTuple):
    """One row of a shard: the file it was, its samples, and a hash of the file's bytes."""

    key: ClipKey
    samples: int
    digest: str


class Listing(NamedTuple):
    """The rows of a finished shard, in columns as `ClipKey` and `CachedClip` name them."""

    paths: Sequence[str]
    sizes: Sequence[int]
    mtimes_ns: Sequence[int]
    samples: Sequence[int]
    digests: Sequence[str]

    @classmethod
    def of(cls, clips: Sequence[CachedClip]) -> "Listing":
        """Arrange clips in columns."""
        columns = list(zip(*((*key, *rest) for key, *rest in clips), strict=True))
        return cls(*(columns or [()] * 5))


class UnreadableClip(NamedTuple):
    """One file that holds no audio that can be used, and why."""

    key: ClipKey
    reason: str
    detail: str


class Shard(NamedTuple):
    """A finished shard and its listing."""

    file: Path
    clips: Listing
    unreadable: Sequence[UnreadableClip]
    sha256: str
    store: str = "pcm"


class HashedFile(io.FileIO):
    """A file that is hashed as it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._digest = hashlib.sha256()

    def write(self, content: Any) -> int:
        """Write all of the content, or raise OSError."""
        rest = memoryview(content).cast("B")
        size = len(rest)
        self._digest.update(rest)
        while rest:
            rest = rest[super().write(rest) :]
        return size

    def digest(self) -> str:
        """Return the SHA-256 of what is written."""
        return self._digest.hexdigest()

    def finish(self) -> str:
        """Wait until all is on the disk, and return the SHA-256."""
        fsync(self.fileno())
        self.close()
        return self.digest()


class AudioFile:
    """Write audio into an Arrow file, a record batch at a time.

    Attributes:
        bytes: of audio so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sink = HashedFile(path)
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._sink, mode="w"), AUDIO_SCHEMA)
        self._batch: list[bytes] = []
        self.bytes = 0

    def add(self, audio: bytes) -> bool:
        """Add a row; return whether those before it were written as a batch."""
        full = sum(map(len, self._batch)) + len(audio) > BATCH_BYTES
        is_written = bool(self._batch) and (full or len(self._batch) >= BATCH_ROWS)
        if is_written:
            self._flush()
        self._batch.append(audio)
        self.bytes += len(audio)
        return is_written

    def so_far(self) -> dict[str, Any]:
        """Return the length and the SHA-256 of the file as it is."""
        return {"bytes": self._sink.tell(), "sha256": self._sink.digest()}

    def finish(self) -> str:
        """Write the rest, and return the file's SHA-256."""
        self._flush()
        self._stream.close()
        return self._sink.finish()

    def discard(self) -> None:
        """Remove what was written, unless it was renamed."""
        with suppress(OSError):
            self._sink.close()
        self.path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._batch:
            batch = pa.record_batch({"audio": pa.array(self._batch, pa.binary())})
            self._stream.write_batch(batch)
            self._batch = []


class ShardWriter:
    """Write one shard; it is there when it is finished, and not before.

    What a killed process wrote is made a shard by `recover_unfinished`, as far as the note beside
    it goes, which is written anew with each record batch.

    audio: what is written so far; unreadable: files that need not be tried again.
    """

    def __init__(self, folder: Path, store: str = "pcm") -> None:
        self._store = store
        self._file = folder / f"{uuid4().hex}.arrow"
        self.audio = AudioFile(self._file.with_name(f".{self._file.name}.tmp"))
        self._note = self._file.with_name(f".{self._file.stem}{NOTE}")
        self._clips: list[CachedClip] = []
        self.unreadable: list[UnreadableClip] = []

    def add(self, clip: CachedClip, audio: bytes) -> None:
        """Add a clip; its audio is on the way to the disk with the next batch."""
        if self.audio.add(audio):
            write_sealed(self._note, self._listing() | self.audio.so_far())
        self._clips.append(clip)

    def finish(self) -> Shard:
        """Write the data, then the listing that makes a shard of them."""
        with naming(self._file):
            sha256 = self.audio.finish()
            self.audio.path.rename(self._file)
        write_sealed(self._file.with_suffix(".json"), self._listing() | {"sha256": sha256})
        self._note.unlink(missing_ok=True)
        write_stamp(self._file, sha256)
        clips = Listing.of(self._clips)
        return Shard(self._file, clips, self.unreadable, sha256, self._store)

    def discard(self) -> None:
        """Remove what was written, unless it is finished."""
        self._note.unlink(missing_ok=True)
        self.audio.discard()

    def _listing(self) -> dict[str, Any]:
        clips = Listing.of(self._clips)
        return {"store": self._store, "clips": clips, "unreadable": self.unreadable}


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with a hash of itself."""
    text = json.dumps(content)
    write_text_atomically(path, json.dumps({"seal": _hash(text)}) + "\n" + text + "\n")


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Read what `write_sealed` wrote; return None where it is damaged."""
    try:
        written = read_regular(path, largest=LARGEST_LISTING, what="A listing of the cache")
        seal, text = written.decode().splitlines()
        content = json.loads(text)
        is_sealed = json.loads(seal) == {"seal": _hash(text)}
        return content if is_sealed and isinstance(content, dict) else None
    except (SbkitError, ValueError, RecursionError):
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_shard(listing: Path) -> Shard | None:
    """Read the listing of a shard; return None where it is damaged, or of another version."""
    content = read_sealed(listing)
    if content is None:
        return None
    try:
        clips = Listing(*(content["clips"] or Listing.of(())))
        if len({len(column) for column in clips}) > 1:
            return None
        unreadable = [UnreadableClip(ClipKey(*key), *rest) for key, *rest in content["unreadable"]]
        paths = [*clips.paths, *(each.key.path for each in unreadable)]
        numbers = [pa.array(each, pa.int64()) for each in clips[1:4]]
        if not all(isinstance(each, str) for each in paths) or any(n.null_count for n in numbers):
            return None
        store = content.get("store", "pcm")  # older listings do not name it
        return Shard(listing.with_suffix(".arrow"), clips, unreadable, content["sha256"], store)
    except (TypeError, ValueError, KeyError, OverflowError):
        return None


def is_intact(shard: Shard) -> bool:
    """Return whether a shard is what was written: its checksum, its rows, and their lengths."""
    if is_stamped(shard.file, shard.sha256):
        return True
    if not has_checksum(shard.file, shard.sha256):
        return False
    lengths = []
    try:
        with pa.memory_map(str(shard.file)) as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                batch.validate(full=True)  # who makes up a shard makes up its checksum, too
                lengths.append(pc.binary_length(batch["audio"]).to_numpy())
    except (pa.ArrowException, LookupError, OSError):
        return False
    found = np.concatenate(lengths) if lengths else np.empty(0)
    if len(found) != len(shard.clips.paths):
        return False
    if shard.store == "pcm" and found.tolist() != [2 * samples for samples in shard.clips.samples]:
        return False
    write_stamp(shard.file, shard.sha256)
    return True


def has_checksum(file: Path, sha256: str) -> bool:
    """Return whether a file's bytes have a checksum."""
    try:
        return file.is_file() and checksum(file) == sha256  # a pipe would be waited for
    except OSError:
        return False


def is_stamped(file: Path, sha256: str) -> bool:
    """Return whether a file was found intact, and nobody wrote to it since."""
    stamp = file.with_suffix(".ok")
    try:
        return stamp.is_file() and stamp.read_text(encoding="utf-8") == _stamp(file, sha256)
    except (OSError, UnicodeDecodeError):
        return False


def write_stamp(file: Path, sha256: str) -> None:
    """Note that a file is intact, where that can be written."""
    with suppress(OSError):
        write_text_atomically(file.with_suffix(".ok"), _stamp(file, sha256))


def _stamp(file: Path, sha256: str) -> str:
    """Describe a file by what changes when anyone writes to it, or puts another in its place."""
    status = file.stat()
    fields = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, sha256)
    return " ".join(map(str, fields)) + "\n"


def list_shards(folder: Path, besides: Container[Path] = ()) -> Iterator[tuple[Path, Shard | None]]:
    """Yield the listing of each shard of a folder, and what it says; None where it is damaged."""
    for listing in sorted(folder.glob("*.json")):
        if listing.name != CORPUS_FILE and listing not in besides:
            yield listing, read_shard(listing)


def remove_shard(listing: Path) -> None:
    """Remove a shard; its listing goes first, so that no part is taken for a whole."""
    for suffix in (".json", ".ok", ".arrow"):
        listing.with_suffix(suffix).unlink(missing_ok=True)


def recover_unfinished(folder: Path) -> None:
    """Make shards of what killed processes noted, and remove the rest of what they left.

    Only who holds the folder's lock may call this.
    """
    for note in folder.glob(f".*{NOTE}"):
        noted, name = read_sealed(note) or {}, note.name.removeprefix(".").removesuffix(NOTE)
        audio, size = folder / f".{name}.arrow.tmp", noted.pop("bytes", None)
        # A power cut may have lost some of it.
        is_there = audio.is_file() and isinstance(size, int) and 0 <= size <= audio.stat().st_size
        if audio.is_symlink() or not is_there:
            continue
        os.truncate(audio, size)
        if has_checksum(audio, str(noted.get("sha256"))):
            audio.rename(folder / f"{name}.arrow")
            write_sealed(folder / f"{name}.json", noted)
    for pattern in (".*.tmp", f"{CLAIM}*", "*.arrow"):
        for file in folder.glob(pattern):
            if file.suffix != ".arrow" or not file.with_suffix(".json").is_file():
                file.unlink(missing_ok=True)
