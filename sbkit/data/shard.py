"""Shards: decoded audio on a disk, in the cache and in a corpus of shards.

NAME.arrow    a row for each clip, which `datasets` reads: its name, and its audio as WAV or FLAC
NAME.parquet  columns of the clips, and the position of their audio in NAME.arrow

The table is written last, so a shard is complete if its table exists. Each clip has a CRC-32, which
is checked when the clip is read.

`audio_store` names how audio is kept: pcm, WAV of int16; flac, the same samples in 60 % of the
space; or lazy, no shard, where the clip's own file is decoded whenever it is read.
"""

import io
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import soundfile
from datasets import Audio, Features

from sbkit.audio.containers import AudioError
from sbkit.audio.io import AudioPart, Samples, read_audio
from sbkit.base.content_cache import default_cache, find_kept
from sbkit.base.errors import DataError
from sbkit.base.files import LOCK_PREFIX, from_plain, fsync, is_abandoned, os_errors_name, task_lock
from sbkit.base.messages import note_once
from sbkit.base.stores import wait_for_store
from sbkit.data.clip_decoding import by_file, decode_clips
from sbkit.data.filesystem import Storage, read_ranges
from sbkit.data.manifest import MIX_FAULT

logger = logging.getLogger(__name__)

LAZY = "lazy"
STORES = ("pcm", "flac", LAZY)
MAX_DURATION_ERROR = 0.05  # seconds; an MP3 encoder adds up to two frames, 48 ms at 48 kHz
AUDIO = "audio"  # the column of a prepared split
AUDIO_TYPE = pa.struct(
    {
        "file": pa.string(),  # a path or a URL; of the cache, relative to it
        "shard": pa.int64(),  # its number in a corpus of shards; 0 in the cache
        "start": pa.int64(),  # bytes; null for a lazy clip, which is a whole file
        "size": pa.int64(),  # bytes; of a lazy clip, of its file
        "crc32": pa.int64(),  # of these bytes
        "sample_rate": pa.int64(),  # Hz, of the decoded samples
    }
)
WAV_HEADER_BYTES = 44  # as libsndfile writes it
CLIPS_PER_REQUEST = 50
BATCH_BYTES = 16_000_000  # audio in one record batch; Arrow's 32-bit offsets allow up to 2 GB
MIN_DAMAGED_CLIPS, CLIPS_PER_DAMAGED_CLIP = 5, 10_000  # a run ends with more than both allow
FACTS_KEY = b"sbkit"  # in the metadata of a table, for its `ShardFacts`
_SCHEMA = Features({AUDIO: Audio()}).arrow_schema

# A row of a prepared split. Its `audio` holds the samples (S,) and its `samples` their number; all
# other columns hold text.
Row = Mapping[str, Any]
AudioLocation = Mapping[str, Any]  # a value of AUDIO_TYPE


# Reading


def read_rows(
    split: datasets.Dataset,
    indices: Sequence[int],
    batch_size: int = CLIPS_PER_REQUEST,
    listing: Path | None = None,
) -> Iterator[Row]:
    """Yield rows of a prepared split with their samples (S,); read ``batch_size`` together.

    listing: of damaged clips, which become silence with weight 0; without it, they are errors.
    """
    for start in range(0, len(indices), batch_size):
        columns = split[indices[start : start + batch_size]]
        locations = columns[AUDIO]
        columns[AUDIO] = wait_for_store(partial(_read_audio, locations))
        for location, *values in zip(locations, *columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            if isinstance(row[AUDIO], DataError):
                _leave_out(row["id"], row[AUDIO], listing, len(split))
                row |= {AUDIO: np.zeros(row["samples"], np.int16), "weight": 0}
            if location["start"] is None:
                rate = location["sample_rate"]
                _warn_of_duration(row["id"], row["samples"] / rate, len(row[AUDIO]) / rate)
                row["samples"] = len(row[AUDIO])
            yield row


def _leave_out(id: str, error: DataError, listing: Path | None, num_clips: int) -> None:
    """List a damaged clip once; raise an error without a listing, or if there are too many."""
    if listing is None:
        raise error
    listed = listing.read_text("utf-8") if listing.exists() else ""  # a check has no run folder
    line = f"train\t{id}\tdamaged\t{error}\n"
    if line in listed:
        return
    max_clips = max(MIN_DAMAGED_CLIPS, num_clips // CLIPS_PER_DAMAGED_CLIP)
    if listed.count("\tdamaged\t") >= max_clips:
        raise DataError(f"More than {max_clips} clips of train are damaged. {error}")
    note_once(f"{id} counts for nothing: {error}", level=logging.WARNING)
    if listing.exists():
        with listing.open("a", encoding="utf-8") as file:
            file.write(line)


@lru_cache(maxsize=1 << 20)  # each clip once
def _warn_of_duration(id: str, stated: float, decoded: float) -> None:
    if abs(stated - decoded) > MAX_DURATION_ERROR:
        logger.warning(f"{id} lasts {decoded:.3f} s, but its corpus states {stated:.3f} s")


def read_clips(split: datasets.Dataset, indices: Sequence[int]) -> Iterator[Samples]:
    """Yield the samples (S,) of rows of a prepared split; those of damaged clips are zeros."""
    clips = split.select_columns(["id", "samples", AUDIO])
    return (row[AUDIO] for row in read_rows(clips, indices, listing=Path(os.devnull)))


def _read_audio(locations: Sequence[AudioLocation]) -> list[Samples | DataError]:
    """Read clips, with a single call of `read_ranges` for all that are in shards."""
    in_shards = [location for location in locations if location["start"] is not None]
    ranges = [(_shard_file(part["file"]), part["start"], part["size"]) for part in in_shards]
    contents = iter(read_ranges(ranges))
    clips: list[Samples | DataError] = []
    for location in locations:
        if location["start"] is None:
            clips.append(_read_file(location))
        else:
            clips.append(_decode(next(contents), location))
    return clips


def _shard_file(name: str) -> str:
    """Return the path or URL of a shard; shards of the cache are named relative to it."""
    path = name if "://" in name else find_kept(name)
    if path is None:
        default_cache().stat()  # raises OSError if its disk is away
        raise DataError(f"{name} is in no cache any more. Start again.")
    return str(path)


def _read_file(location: AudioLocation) -> Samples:
    """Decode a file that has the size that it had when the data was prepared."""
    # The whole file, because libsndfile takes a read that fails for the end of the file.
    try:
        content = Path(location["file"]).read_bytes()
        if len(content) != location["size"]:
            raise DataError(
                f"{location['file']} has {len(content)} bytes, but had {location['size']} when the "
                "data was prepared. Start again."
            )
        return read_audio(content, location["sample_rate"])
    except (AudioError, FileNotFoundError) as error:
        raise DataError(f"{location['file']}: {error}") from error


def _decode(content: bytes, location: AudioLocation) -> Samples | DataError:
    """Decode a clip, or return an error if it is damaged."""
    if zlib.crc32(content) != location["crc32"]:
        file = _shard_file(location["file"])
        return DataError(
            f"{file} is damaged: the clip at byte {location['start']} has another checksum than "
            f"when it was written. `sbkit prepare --verify {file.rpartition('/')[0]}` lists all "
            "such shards. In the cache, remove it and start again."
        )
    if content.startswith(b"RIFF"):
        return np.frombuffer(content, "<i2", offset=WAV_HEADER_BYTES)
    samples: Samples = soundfile.read(io.BytesIO(content), dtype="int16")[0]
    return samples


# Writing


@dataclass(frozen=True)
class ShardFacts:
    """Facts about a shard, kept in the metadata of its table; it holds whole parts of a unit."""

    bytes: int  # size of the Arrow file
    left_out: Sequence[Sequence[Any]]  # the clips without usable audio, and why
    parts: int = 1  # number of the unit's parts in this shard and in the shards before it
    last: bool = True  # whether this is the last shard of the unit


class ShardWriter:
    """Write one shard under a temporary name, until it is published."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f".{uuid4().hex}.arrow.tmp"
        self._file = self._path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, _SCHEMA)
        self._batch: list[dict[str, str | bytes]] = []
        self._batch_bytes = 0
        self._crcs: list[int] = []
        self._samples: list[int] = []
        self.digests: list[str] = []
        self._mix_faults: list[str] = []
        self.audio_bytes = 0  # size of the audio added so far

    def add_clips(
        self,
        names: Sequence[str],
        parts: Sequence[AudioPart],
        sample_rate: int,
        *,
        store: str,
        on_clip: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], dict[int, AudioError]]:
        """Decode clips and add them; return their indices in their new order, and errors."""
        added: list[int] = []
        errors: dict[int, AudioError] = {}
        order = by_file(parts)
        decoding = decode_clips([parts[index] for index in order], sample_rate, store=store)
        for index, decoded in zip(order, decoding, strict=True):
            on_clip()
            if isinstance(decoded.audio, AudioError):
                errors[index] = decoded.audio
                continue
            if len(decoded.audio) + self._batch_bytes > BATCH_BYTES:
                self._flush()
            self._batch.append({"bytes": decoded.audio, "path": names[index]})
            self._batch_bytes += len(decoded.audio)
            self._crcs.append(zlib.crc32(decoded.audio))
            self._samples.append(decoded.samples)
            self.digests.append(decoded.digest)
            self._mix_faults.append(decoded.mix_fault)
            self.audio_bytes += len(decoded.audio)
            added.append(index)
        return added, errors

    def _flush(self) -> None:
        if self._batch:
            self._stream.write_batch(pa.record_batch({AUDIO: self._batch}, _SCHEMA))
        self._batch = []
        self._batch_bytes = 0

    def publish(
        self,
        storage: Storage,
        name: str,
        columns: Mapping[str, pa.Array | pa.ChunkedArray],
        *,
        left_out: Sequence[Sequence[Any]],
        parts: int = 1,
        is_last_part: bool = True,
    ) -> None:
        """Move the audio file into ``storage`` as NAME.arrow, then write NAME.parquet."""
        with os_errors_name(self._path):
            self._flush()
            self._stream.close()
            self._file.flush()
            fsync(self._file.fileno())
            self._file.close()
        file_size = self._path.stat().st_size
        starts, sizes = locate_audio(self._path)
        crcs = pa.array(self._crcs, pa.int64())
        digests = pa.array(self.digests, pa.string())
        field_names = ["start", "size", "crc32", "digest"]
        audio = pa.StructArray.from_arrays([starts, sizes, crcs, digests], field_names)
        samples = pa.array(self._samples, pa.int64())
        faults = pa.array(self._mix_faults, pa.string())
        table = pa.table({"samples": samples, MIX_FAULT: faults, AUDIO: audio, **columns})
        facts = ShardFacts(file_size, left_out, parts, is_last_part)
        metadata = {FACTS_KEY: json.dumps(asdict(facts))}
        content = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), content, write_page_checksum=True)
        storage.move_in(self._path, f"{name}.arrow")
        storage.write(f"{name}.parquet", content.getvalue())

    def close(self) -> None:
        """Remove the file, unless it is published."""
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


def locate_audio(file: Path) -> tuple[pa.Array, pa.Array]:
    """Return the position and the size, in bytes, of the audio of each row of an Arrow file."""
    starts = [np.empty(0, np.int64)]
    sizes = [np.empty(0, np.int64)]
    with pa.memory_map(str(file)) as source:
        buffer = source.read_buffer()
        for batch in pa.ipc.open_stream(buffer):
            _, offset_buffer, audio = batch[AUDIO].field("bytes").buffers()
            offsets = np.frombuffer(offset_buffer, np.int32)[: len(batch) + 1].astype(np.int64)
            starts.append(audio.address - buffer.address + offsets[:-1])
            sizes.append(np.diff(offsets))
    return pa.array(np.concatenate(starts)), pa.array(np.concatenate(sizes))


def read_shard_table(content: bytes) -> tuple[pa.Table, ShardFacts]:
    """Read a table that `ShardWriter.publish` wrote.

    Raises ValueError, OSError, LookupError or TypeError if it is damaged, or not such a table.
    """
    table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
    facts = from_plain(ShardFacts, json.loads((table.schema.metadata or {})[FACTS_KEY]))
    return table.replace_schema_metadata(None), facts


def check_audio(table: pa.Table, file: str) -> None:
    """Read all clips of a shard; raise DataError unless they have the checksums of its table."""
    for batch in table.to_batches(CLIPS_PER_REQUEST):
        clips = batch[AUDIO].to_pylist()
        contents = read_ranges([(file, clip["start"], clip["size"]) for clip in clips])
        if [*map(zlib.crc32, contents)] != [clip["crc32"] for clip in clips]:
            raise DataError(f"{file} is damaged.")


def to_located_audio(table: pa.Table, file: str, *, shard: int, sample_rate: int) -> pa.Table:
    """Return samples, digest, mix_fault and audio of a table, the audio as AUDIO_TYPE."""
    audio = table[AUDIO].combine_chunks()
    columns = {name: audio.field(name) for name in ("start", "size", "crc32")}
    columns |= {"file": pa.repeat(file, len(table)), "shard": pa.repeat(shard, len(table))}
    columns["sample_rate"] = pa.repeat(sample_rate, len(table))
    fields = list(AUDIO_TYPE)
    locations = pa.StructArray.from_arrays([columns[field.name] for field in fields], fields=fields)
    return pa.table(
        {
            "samples": table["samples"],
            "digest": audio.field("digest"),
            MIX_FAULT: table[MIX_FAULT],
            AUDIO: locations,
        }
    )


def has_mix_faults(table: pa.Table) -> bool:
    """Return whether the mix of any clip's channels loses something."""
    return bool(pc.any(pc.not_equal(table[MIX_FAULT], "")).as_py())


# Sharing the work between processes


def share_work(folder: Path, tasks: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Share named tasks with other processes that call this function with the same tasks.

    Each process runs every task that no other is running, waits for the others, and runs their
    tasks as well: one of them may have failed. So a task must do nothing if its work is done.
    """
    held_elsewhere = []
    for name, task in tasks:
        with task_lock(folder, name, wait=False) as is_held:
            if is_held:
                task()
            else:
                held_elsewhere.append((name, task))
    if held_elsewhere:
        logger.info(
            f"Waiting for other processes, which write {len(held_elsewhere)} of {len(tasks)} parts."
        )
    for name, task in held_elsewhere:
        with task_lock(folder, name, wait=True):
            task()


def remove_leftovers(folder: Path) -> None:
    """Remove the files that killed processes left there at least a day ago.

    Younger ones may be of another machine, whose locks this one does not see.
    """
    for pattern in (".*.tmp", f"{LOCK_PREFIX}*"):
        for path in folder.glob(pattern):
            if not path.is_dir() and is_abandoned(path):  # folders are left to `atomic_folder`
                path.unlink(missing_ok=True)
