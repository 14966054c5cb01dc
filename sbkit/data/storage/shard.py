"""Shards: the form of decoded audio on a disk, in the cache and in a corpus of shards.

NAME.arrow    a row for each clip: its name and its audio as WAV or FLAC, which `datasets` reads
NAME.parquet  what is known of the clips, and which bytes of NAME.arrow are whose

The table is written last, so a shard is whole if its table is there. Each clip has a CRC-32, which
is compared when the clip is read.
"""

import fcntl
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Audio, Features

from sbkit.audio.io import AudioError
from sbkit.base.files import naming, try_lock
from sbkit.data.storage.audio_store import AUDIO, PLACE, decode_clips
from sbkit.data.storage.filesystem import Storage
from sbkit.logs.log import log

BATCH_BYTES = 16_000_000  # of audio in a record batch, whose values must stay below 2 GB
CLAIM = ".claim-"  # begins the name of the lock file of some work
FACTS = b"sbkit"  # the key of a table's metadata that holds its `ShardFacts`
_SCHEMA = Features({AUDIO: Audio()}).arrow_schema


@dataclass(frozen=True)
class ShardFacts:
    """What is known of one shard beside its clips.

    bytes: of the Arrow file; left_out: what holds no usable audio, and why; parts: of its unit that
    were read up to its end; last: whether they are all.
    """

    bytes: int
    left_out: Sequence[Sequence[Any]]
    parts: int = 1
    last: bool = True


class ShardWriter:
    """Write one shard; it appears when it is published.

    Attributes:
        bytes: of audio so far.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f".{uuid4().hex}.arrow.tmp"
        self._file = self._path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, _SCHEMA)
        self._batch: list[dict[str, Any]] = []
        self._crcs, self._samples, self._digests = list[int](), list[int](), list[str]()
        self.bytes = 0

    def decode(
        self,
        names: Iterable[str],
        paths: Iterable[Path],
        sample_rate: int,
        *,
        store: str,
        count: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], dict[int, AudioError]]:
        """Decode clips and add them; return which were added, and why the others were not."""
        kept, errors = list[int](), dict[int, AudioError]()
        decoding = decode_clips(paths, sample_rate, store=store)
        for place, (name, decoded) in enumerate(zip(names, decoding, strict=True)):
            count()
            if isinstance(decoded.audio, AudioError):
                errors[place] = decoded.audio
            else:
                self._add(name, decoded.audio)
                self._samples.append(decoded.samples)
                self._digests.append(decoded.digest)
                kept.append(place)
        return kept, errors

    def _add(self, name: str, audio: bytes) -> None:
        """Add the audio of a clip, which goes to the disk with its record batch."""
        if len(audio) + sum(len(each["bytes"]) for each in self._batch) > BATCH_BYTES:
            self._flush()
        self._batch.append({"bytes": audio, "path": name})
        self._crcs.append(zlib.crc32(audio))
        self.bytes += len(audio)

    def publish(
        self, storage: Storage, name: str, columns: Mapping[str, Any], **facts: Any
    ) -> None:
        """Put the audio in its place, then its table, which has further columns.

        Without any audio, as with ``audio_store: none``, there is a table alone.
        """
        with naming(self._path):
            self._flush()
            self._stream.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        size = self._path.stat().st_size if self.bytes else 0
        written = ShardFacts(size, **facts)
        samples = pa.array(self._samples, pa.int64())
        table = pa.table({"samples": samples, AUDIO: self._places(), **columns})
        table = table.replace_schema_metadata({FACTS: json.dumps(asdict(written))})
        content = io.BytesIO()
        pq.write_table(table, content, write_page_checksum=True)
        if self.bytes:
            storage.take(self._path, f"{name}.arrow")
        storage.write(f"{name}.parquet", content.getvalue())

    def close(self) -> None:
        """Remove what was written, unless it is published."""
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._batch:
            batch = pa.record_batch({AUDIO: self._batch}, _SCHEMA)
            self._stream.write_batch(batch)
            self._batch = []

    def _places(self) -> pa.StructArray:
        """Return where the audio of each clip begins, its size and CRC-32, and its digest."""
        starts, sizes = (
            locate(self._path) if self.bytes else (pa.nulls(len(self._crcs), pa.int64()),) * 2
        )
        crcs = pa.array(self._crcs, pa.int64())
        digests = pa.array(self._digests, pa.string())
        names = ["start", "size", "crc32", "digest"]
        return pa.StructArray.from_arrays([starts, sizes, crcs, digests], names)


def locate(file: Path) -> tuple[pa.Array, pa.Array]:
    """Return where the audio of each row of an Arrow file begins, and its size, in bytes."""
    starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    with pa.memory_map(str(file)) as source:
        whole = source.read_buffer()
        for batch in pa.ipc.open_stream(whole):
            _, offsets, audio = batch[AUDIO].field("bytes").buffers()
            ends = np.frombuffer(offsets, np.int32)[: len(batch) + 1].astype(np.int64)
            starts.append(audio.address - whole.address + ends[:-1])
            sizes.append(np.diff(ends))
    return pa.array(np.concatenate(starts)), pa.array(np.concatenate(sizes))


def read_table(content: bytes) -> tuple[pa.Table, ShardFacts]:
    """Read what `ShardWriter.publish` wrote beside a shard.

    Raises:
        ValueError, OSError, LookupError: it is damaged, or somebody else's.
    """
    table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
    facts = ShardFacts(**json.loads((table.schema.metadata or {})[FACTS]))
    return table.replace_schema_metadata(None), facts


def to_stored(table: pa.Table, files: pa.Array, *, shard: int, sample_rate: int) -> pa.Table:
    """Return the samples, digest and `PLACE` of each row of a shard, given its audio's file."""
    audio = table[AUDIO].combine_chunks()
    columns = {name: audio.field(name) for name in ("start", "size", "crc32")}
    columns |= {"file": files, "shard": pa.repeat(shard, len(table))}
    columns["sample_rate"] = pa.repeat(sample_rate, len(table))
    places = pa.StructArray.from_arrays([columns[each.name] for each in PLACE], fields=list(PLACE))
    return pa.table({"samples": table["samples"], "digest": audio.field("digest"), AUDIO: places})


def share_work(folder: Path, works: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Do works, known by their names, that other processes may do at the same time.

    Each process takes what no other one holds, and waits for the others in the end. A work that
    another process has done must find that out by itself.
    """
    held = []
    for name, work in works:
        with claimed(folder, name, wait=False) as mine:
            if mine:
                work()
            else:
                held.append((name, work))
    if held:
        log(f"Other processes write {len(held)} of {len(works)} parts; waiting for them.")
    for name, work in held:
        with claimed(folder, name, wait=True):
            work()


@contextmanager
def claimed(folder: Path, work: str, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of some work, by its name; yield whether it is held.

    A disk without locks has one process.
    """
    file = folder / f"{CLAIM}{hashlib.sha256(work.encode()).hexdigest()[:16]}"
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
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


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left; call it only while no other process writes there."""
    for pattern in (".*.tmp", f"{CLAIM}*"):
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)
