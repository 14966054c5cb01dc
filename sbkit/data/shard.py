"""Shards: the form of decoded audio on a disk, in the cache and in a corpus of shards.

NAME.arrow    a row for each clip: its name and its audio as WAV or FLAC, which `datasets` reads
NAME.parquet  what is known of the clips, and which bytes of NAME.arrow are whose

The table is written last, so a shard is whole if its table is there. Each clip has a CRC-32, which
is compared when the clip is read.

Where the audio of a prepared split lies, and how its samples are read.

`audio_store` names what is kept of each clip:

pcm   WAV of int16: nothing is decoded again; 115 MB for an hour at 16 kHz
flac  the same samples in six tenths of the space, decoded when they are read
none  nothing: the clip's own file is decoded when it is read

The column `audio` of a prepared split holds a `PLACE` for each row: some bytes of a shard, in the
cache or at a URL, or the clip's own file.

Decode many clips on all cores, and show how many are done.
"""

import fcntl
import hashlib
import io
import json
import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
import torch
from datasets import Audio, Features

from sbkit.audio.io import AudioError, Samples, read_audio
from sbkit.base.errors import SbkitError
from sbkit.base.files import naming, try_lock
from sbkit.base.machine import usable_cores
from sbkit.data.filesystem import Storage, read_ranges
from sbkit.logs.progress import shown

logger = logging.getLogger(__name__)

STORES = ("pcm", "flac", "none")
AUDIO = "audio"  # the column
PLACE = pa.struct(
    {
        "file": pa.string(),  # a path or a URL
        "shard": pa.int64(),  # its number in a corpus of shards; 0 in the cache
        "start": pa.int64(),  # bytes; null: the whole file is a clip of its own
        "size": pa.int64(),
        "crc32": pa.int64(),  # of these bytes
        "sample_rate": pa.int64(),  # Hz, of the samples to return
    }
)
WAV_HEADER = 44  # bytes, as libsndfile writes it
FASTEST = 0.0  # of FLAC's compressions; the highest takes four times as long for 3 % less


def require_store(name: object) -> str:
    """Return the name of a store; raises SbkitError for an unknown one."""
    if name not in STORES:
        raise SbkitError(
            f"`audio_store` must be one of {', '.join(STORES)}, but is {name!r}. Choose pcm for "
            "speed, flac for six tenths of the disk, none for no disk."
        )
    return str(name)


def encode(samples: Samples, *, store: str, sample_rate: int) -> bytes:
    """Return what a store keeps of a clip, samples (S,)."""
    if store == "none":
        return b""
    content = io.BytesIO()
    options = {"compression_level": FASTEST} if store == "flac" else {}
    kind = "FLAC" if store == "flac" else "WAV"
    soundfile.write(content, samples, sample_rate, format=kind, subtype="PCM_16", **options)
    return content.getvalue()


def read_rows(
    split: datasets.Dataset, rows: Sequence[int], at_once: int = 50
) -> Iterator[dict[str, Any]]:
    """Yield rows of a prepared split, with samples (S,) in ``audio``; read ``at_once`` together.

    Raises:
        SbkitError: a file is missing, cut short or damaged, or not the one that was prepared.
    """
    for start in range(0, len(rows), at_once):
        columns = split[rows[start : start + at_once]]
        columns[AUDIO] = _read(columns[AUDIO])
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            if len(row[AUDIO]) != row["samples"]:
                raise SbkitError(
                    f"A clip must be as long as when it was prepared ({row['samples']} samples), "
                    f"but {row['id']} has {len(row[AUDIO])} now. Start the run again: it prepares "
                    "what changed."
                )
            yield row


def read_clips(
    split: datasets.Dataset, rows: Sequence[int], at_once: int = 50
) -> Iterator[Samples]:
    """Yield the samples (S,) of rows of a prepared split; raises SbkitError as `read_rows`."""
    clips = split.select_columns(["id", "samples", AUDIO])
    return (row[AUDIO] for row in read_rows(clips, rows, at_once))


def _read(places: Sequence[dict[str, Any]]) -> list[Samples]:
    """Read the clips of several places, those of shards in one request."""
    ranges = [
        (each["file"], each["start"], each["size"]) for each in places if each["start"] is not None
    ]
    stored = iter(read_ranges(ranges))
    return [
        read_audio(place["file"], place["sample_rate"])
        if place["start"] is None
        else _decode(next(stored), place)
        for place in places
    ]


def _decode(content: bytes, place: dict[str, Any]) -> Samples:
    if zlib.crc32(content) != place["crc32"]:
        end = place["start"] + place["size"]
        raise SbkitError(
            f"{place['file']} must hold what was prepared, but is damaged (the checksum of bytes "
            f"{place['start']} to {end} is another). Copy it again, or remove it and prepare the "
            "data again."
        )
    if content.startswith(b"RIFF"):
        return np.frombuffer(content, "<i2", offset=WAV_HEADER)
    samples: Samples = soundfile.read(io.BytesIO(content), dtype="int16")[0]
    return samples


CLIPS_AHEAD = 8  # per thread, decoded before they are written


class Decoded(NamedTuple):
    """What is kept of a clip's audio or why there is none, its length, and a hash of its file."""

    audio: bytes | AudioError
    samples: int = 0
    digest: str = ""


def decode_clips(
    paths: Iterable[Path], sample_rate: int, *, store: str = "pcm"
) -> Iterator[Decoded]:
    """Decode on all cores, in order, into what a store keeps.

    Threads, since libsndfile and torch release the interpreter: 200 clips of 48 kHz mp3 took 0.91 s
    on one, 0.50 s on two threads, and 2.7 s in two processes that were already running.
    """
    threads, torch_threads = usable_cores(), torch.get_num_threads()
    torch.set_num_threads(1)  # each decoding thread would start threads of torch's own
    paths = iter(paths)
    ahead: deque[Future[Decoded]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            while True:
                for path in islice(paths, CLIPS_AHEAD * threads - len(ahead)):
                    ahead.append(pool.submit(decode_clip, path, sample_rate, store))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            torch.set_num_threads(torch_threads)


def decode_clip(path: Path, sample_rate: int, store: str = "pcm") -> Decoded:
    """Decode one clip; return what is wrong with it where it cannot be decoded."""
    try:
        samples = read_audio(path, sample_rate)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except AudioError as error:
        return Decoded(error)
    except OSError as error:
        sentence = f"{path} must be readable, but is not: {error}. Repair that."
        return Decoded(AudioError("unreachable", sentence))
    return Decoded(encode(samples, store=store, sample_rate=sample_rate), len(samples), digest)


@contextmanager
def decoding_progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many clips are decoded; yield what counts one."""
    with shown(title, total) as advance:
        yield lambda: advance(1)


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
        logger.info(f"Other processes write {len(held)} of {len(works)} parts; waiting for them.")
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
