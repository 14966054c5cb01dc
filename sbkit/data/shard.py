"""Read and write shards: decoded audio on a disk or in a store, and the tables of its clips.

NAME.clips    the clips as WAVs or FLACs, one after another
NAME.parquet  a row for each clip: its file and the span of it, the size, the time and the digest
              of the file, and the position of its audio in NAME.clips, or why it has none; columns
              of a table's rows

The table is written last, so a shard is complete if its table exists. Each clip has a CRC-32, which
is checked when the clip is read.

`audio_store` decides how audio is stored: pcm, WAV of int16; flac, the same samples in 60 % of the
space; or lazy, without shards: a clip's own file is decoded whenever the clip is read.
"""

import io
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import soundfile

from sbkit.audio.containers import AudioError
from sbkit.audio.io import BEYOND_END, AudioSpan, Samples, read_audio
from sbkit.base.errors import DataError
from sbkit.base.files import fsync, os_errors_name, temporary_path
from sbkit.base.messages import note_once
from sbkit.base.stores import wait_for_store
from sbkit.base.user_folders import cache_folder
from sbkit.base.workers import ThreadPool
from sbkit.config.keys import AudioStore
from sbkit.data.clip_decoding import DecodedFile, decode_file
from sbkit.data.filesystem import Storage, map_ahead, read_ranges
from sbkit.data.manifest import CHANNEL_FAULT, Excluded

logger = logging.getLogger(__name__)

LAZY = "lazy"
STORES: tuple[str, ...] = get_args(AudioStore)
MAX_DURATION_ERROR = 0.05  # seconds; an MP3 encoder adds up to two frames, 48 ms at 48 kHz
AUDIO = "audio"  # the column of a prepared split
AUDIO_TYPE = pa.struct(
    {
        "file": pa.string(),  # a path or a URL; in the cache, relative to the cache folder
        "shard": pa.int64(),  # its number in the corpus; 0 in the cache
        "start": pa.int64(),  # bytes; null for a lazy clip, which is a whole file
        "size": pa.int64(),  # bytes; the size of the file if the clip is lazy
        "crc32": pa.int64(),  # of these bytes
        "sample_rate": pa.int64(),  # Hz, of the decoded samples
        "digest": pa.string(),  # of the clip's file, followed by the position in it
        "file_rate": pa.int64(),  # Hz, of this file; null if the clip is lazy
    }
)
CLIP_KEYS = ("path", "part", "file_size", "file_time")
CLIP_TYPE = pa.struct(  # the column AUDIO of a shard's table
    {
        "path": pa.large_binary(),  # of the clip's file
        "part": pa.string(),  # the clip's position in its file, "" for a whole file
        "file_size": pa.int64(),  # bytes
        "file_time": pa.int64(),  # nanoseconds
        "start": pa.int64(),  # bytes, in the shard
        "size": pa.int64(),
        "crc32": pa.int64(),
        "digest": pa.string(),
        "file_rate": pa.int64(),
        "reason": pa.string(),  # to leave out a clip without usable audio; null if it is stored
        "message": pa.string(),
    }
)
UNREADABLE_AUDIO = "unreadable audio"  # a reason to leave out a clip
FORGOTTEN = "forgotten"  # the reason of a row without a name, with the size of what was erased
# Faults that are not recorded, because the file may be there at the next attempt
TEMPORARY_REASONS = ("missing", "unreachable")
WAV_HEADER_BYTES = 44  # as libsndfile writes it
CLIPS_PER_REQUEST = 50
# A run fails if it has more damaged clips than both of these allow.
MIN_DAMAGED_CLIPS, CLIPS_PER_DAMAGED_CLIP = 5, 10_000
NUM_THREADS = 16  # they wait for a store or a disk
BUFFER_BYTES = 16_000_000  # written at once; files of small writes are read 15 % slower

# A row of a prepared split. Its `audio` holds the samples (S,) and its `samples` their number; all
# other columns hold text.
Row = Mapping[str, Any]
AudioLocation = Mapping[str, Any]  # a value of AUDIO_TYPE


# ---- reading


def read_rows(
    split: datasets.Dataset,
    indices: Sequence[int],
    batch_size: int = CLIPS_PER_REQUEST,
    listing: Path | None = None,
    relocate: Callable[[AudioLocation], AudioLocation] = lambda location: location,
) -> Iterator[Row]:
    """Yield rows of a prepared split with their samples (S,); read ``batch_size`` rows at once.

    listing: the file that lists damaged clips, which become silence with weight 0; without it, a
        damaged clip is an error.
    relocate: returns another location of the same audio, such as in the copy of a shard.
    """
    for start in range(0, len(indices), batch_size):
        columns = split[indices[start : start + batch_size]]
        locations = columns[AUDIO]
        columns[AUDIO] = wait_for_store(partial(_read_audio, locations, relocate))
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
    """List a damaged clip once; raise its error without a listing, or if there are too many."""
    if listing is None:
        raise error
    listed = listing.read_text("utf-8") if listing.exists() else ""  # a check has no run folder
    line = f"train\t{id}\tdamaged\t{error}\n"
    if line in listed:
        return
    max_clips = max(MIN_DAMAGED_CLIPS, num_clips // CLIPS_PER_DAMAGED_CLIP)
    if listed.count("\tdamaged\t") >= max_clips:
        raise DataError(f"More than {max_clips} clips of train are damaged. {error}")
    note_once(f"{id} is left out of training: {error}", level=logging.WARNING)
    if listing.exists():
        with listing.open("a", encoding="utf-8") as file:
            file.write(line)


@lru_cache(maxsize=1 << 20)  # each clip once
def _warn_of_duration(id: str, stated: float, decoded: float) -> None:
    if abs(stated - decoded) > MAX_DURATION_ERROR:
        logger.warning(f"{id} lasts {decoded:.3f} s, but its corpus states {stated:.3f} s")


def read_samples(split: datasets.Dataset, indices: Sequence[int]) -> Iterator[Samples]:
    """Yield the samples (S,) of rows of a prepared split; zeros for damaged clips."""
    clips = split.select_columns(["id", "samples", AUDIO])
    return (row[AUDIO] for row in read_rows(clips, indices, listing=Path(os.devnull)))


def _read_audio(
    locations: Sequence[AudioLocation], relocate: Callable[[AudioLocation], AudioLocation]
) -> list[Samples | DataError]:
    """Read clips, with a single call of `read_ranges` for all clips in shards."""
    locations = [*map(relocate, locations)]
    in_shards = [location for location in locations if location["start"] is not None]
    ranges = [(_shard_file(place["file"]), place["start"], place["size"]) for place in in_shards]
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
    return name if "://" in name else str(cache_folder() / name)


def _read_file(location: AudioLocation) -> Samples:
    """Decode a file that must have the same size as when the data was prepared."""
    # The whole file is read first, because libsndfile takes a failed read for the end of the file.
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
            f"{file} is damaged: the checksum of the clip at byte {location['start']} has changed. "
            f"`sbkit prepare --verify {file.rpartition('/')[0]}` lists all damaged shards. In the "
            "cache, remove the file and start again."
        )
    if content.startswith(b"RIFF"):
        return np.frombuffer(content, "<i2", offset=WAV_HEADER_BYTES)
    samples: Samples = soundfile.read(io.BytesIO(content), dtype="int16")[0]
    return samples


# ---- writing


class FileStamp(NamedTuple):
    """The size of a file in bytes and its time in nanoseconds; -1 and 0 if it cannot be reached."""

    size: int
    time: int


class ShardTable(NamedTuple):
    """The table of a shard, with the columns samples, mix_fault, audio and those of a table."""

    name: str
    table: pa.Table

    @property
    def stored(self) -> pa.Table:
        return self.table.filter(pc.is_null(self._reasons))

    @property
    def left_out(self) -> pa.Table:
        """The clips without usable audio."""
        reasons = self._reasons.fill_null(FORGOTTEN)
        return self.table.filter(pc.not_equal(reasons, FORGOTTEN))

    @property
    def audio_bytes(self) -> int:
        """The size of the audio file."""
        return pc.sum(pc.struct_field(self.table[AUDIO], "size")).as_py() or 0

    @property
    def _reasons(self) -> pa.ChunkedArray:
        return pc.struct_field(self.table[AUDIO], "reason")


class ShardWriter:
    """Write one shard under a temporary name until it is published.

    store: pcm or flac.
    """

    def __init__(self, folder: Path, sample_rate: int, store: str) -> None:
        self._sample_rate, self._store = sample_rate, store
        self._path = temporary_path(folder / "shard.clips")
        self._file = self._path.open("wb", BUFFER_BYTES)
        self._clips: list[dict[str, Any]] = []
        self._samples: list[int] = []
        self._channel_faults: list[str] = []
        self.audio_bytes = 0  # size of the audio added so far

    def __len__(self) -> int:
        return len(self._clips)

    def add(
        self, clips: Sequence[AudioSpan], stamp: FileStamp, content: bytes | None = None
    ) -> None:
        """Decode and add clips of one file and channel, except for those with temporary faults.

        content: of the file, if it is inside another file.
        """
        added: list[dict[str, Any]] = []
        file = DecodedFile()
        decoding = decode_file(clips, self._sample_rate, self._store, file, content)
        for clip, (audio, samples) in zip(clips, decoding, strict=True):
            row: dict[str, Any] = {"path": os.fsencode(clip.path), "part": span_key(clip)}
            row |= {"file_size": stamp.size, "file_time": stamp.time}
            if isinstance(audio, bytes):
                self._file.write(audio)
                row |= {"start": self.audio_bytes, "size": len(audio), "crc32": zlib.crc32(audio)}
                self.audio_bytes += len(audio)
            elif audio.reason in TEMPORARY_REASONS:
                continue
            else:
                is_beyond_end = audio.reason == BEYOND_END
                row["reason"] = BEYOND_END if is_beyond_end else UNREADABLE_AUDIO
                row["message"] = str(audio)
            added.append(row)
            self._samples.append(samples)
        for row in added:
            digest = f"{file.digest}:{row['part']}" if row["part"] else file.digest
            row |= {"digest": digest, "file_rate": file.rate}
        self._clips += added
        self._channel_faults += [file.channel_fault] * len(added)

    def leave_out(self, rows: Sequence[Excluded]) -> None:
        """Add rows of a table that have no audio."""
        self._clips += [{"reason": row.reason, "message": row.detail} for row in rows]
        self._samples += [0] * len(rows)
        self._channel_faults += [""] * len(rows)

    def publish(self, storage: Storage, name: str, columns: pa.Table | None = None) -> None:
        """Move the audio file into ``storage`` as NAME.clips, then write NAME.parquet.

        columns: other columns of the clips.
        """
        with os_errors_name(self._path):
            self._file.flush()
            fsync(self._file.fileno())
            self._file.close()
        shard_columns = {
            "samples": pa.array(self._samples, pa.int64()),
            CHANNEL_FAULT: pa.array(self._channel_faults, pa.string()),
            AUDIO: pa.array(self._clips, CLIP_TYPE),
        }
        if columns is not None:
            shard_columns |= {name: columns[name] for name in columns.column_names}
        storage.move_in(self._path, f"{name}.clips")
        write_shard_table(storage, ShardTable(name, pa.table(shard_columns)))

    def close(self) -> None:
        """Remove the file, unless it is published."""
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


def span_key(clip: AudioSpan) -> str:
    """Return the position of a clip in its file, "" for a whole file."""
    return "" if clip.is_file else ":".join(map(str, clip[1:]))


def write_shard_table(storage: Storage, shard: ShardTable) -> None:
    """Write NAME.parquet."""
    content = io.BytesIO()
    pq.write_table(shard.table, content, write_page_checksum=True)
    storage.write(f"{shard.name}.parquet", content.getvalue())


def read_shard_tables(storage: Storage, names: Iterable[str]) -> Iterator[ShardTable]:
    """Yield the tables of shards in order; they are fetched in parallel.

    Raises DataError for a damaged table.
    """

    def read(name: str) -> ShardTable:
        content = storage.read(f"{name}.parquet")
        try:
            table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
            if table.schema.field(AUDIO).type != CLIP_TYPE:
                raise ValueError("it has other columns")
            return ShardTable(name, table)
        except (OSError, ValueError, LookupError) as error:
            raise DataError(
                f"{storage.url_of(name)}.parquet is damaged ({str(error)[:100]}). Remove it, and "
                "rerun the `sbkit prepare` that wrote it: it writes missing shards."
            ) from error

    with ThreadPool(NUM_THREADS) as pool:
        yield from map_ahead(pool, read, names)


def is_whole(storage: Storage, name: str, size: int | None) -> bool:
    """Read a shard; return whether its table and all clips are undamaged.

    size: of its audio file in bytes; None if the file is missing.
    """
    file = storage.url_of(f"{name}.clips")
    try:
        (shard,) = read_shard_tables(storage, [name])
        for batch in shard.stored.to_batches(CLIPS_PER_REQUEST):
            clips = batch[AUDIO].to_pylist()
            contents = read_ranges([(file, clip["start"], clip["size"]) for clip in clips])
            if [*map(zlib.crc32, contents)] != [clip["crc32"] for clip in clips]:
                return False
    except DataError:
        return False
    return size == shard.audio_bytes
