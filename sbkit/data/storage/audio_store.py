"""What is kept of each clip's audio, by the knob ``audio_store``, and how it is read again.

pcm   int16 samples: nothing is decoded again; 115 MB for an hour at 16 kHz
flac  the same samples without loss in six tenths of the room, decoded when they are read
none  the path of the clip's own file, which is decoded when it is read: no room at all

Each has a column of its own in a prepared split, which holds bytes; `read_stored` makes samples of
any of them. Of a corpus in shards, one column says where these bytes lie; `read_rows` fetches them.
"""

import io
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import soundfile

from sbkit.audio.io import Samples, read_audio
from sbkit.base.errors import SbkitError
from sbkit.data.storage.filesystem import ByteRange, read_ranges

COLUMNS = {"pcm": "audio", "flac": "audio_flac", "none": "audio_file"}
WITH_AUDIO = ("pcm", "flac")  # shards have no other: a path would lead into this machine
SHARDED = "audio_shard"  # the column of a corpus in shards: a `PLACE` for each clip
PLACE = pa.struct(
    {
        "file": pa.string(),  # a URL
        "store": pa.string(),
        "start": pa.int64(),  # bytes
        "size": pa.int64(),
        "crc32": pa.int64(),  # of these bytes
    }
)
FASTEST = 0.0  # of FLAC's compressions; the highest takes four times as long for 3 % less


def require_store(name: object) -> str:
    """Return the name of a store; raises SbkitError where it is none."""
    if name not in [*COLUMNS]:  # a list cannot be looked up
        raise SbkitError(
            f"`audio_store` must be one of {', '.join(COLUMNS)}, but is {name!r}. Choose pcm for "
            "speed, flac for six tenths of the disk, none for no disk."
        )
    return str(name)


def to_stored(audio: bytes, path: Path, *, store: str, sample_rate: int) -> bytes:
    """Return what is kept of a clip: its samples (S,) as little-endian int16 -> bytes."""
    if store == "pcm":
        return audio
    if store == "none":
        return b"%d %s" % (sample_rate, os.fsencode(path))
    content = io.BytesIO()
    samples = np.frombuffer(audio, "<i2")
    soundfile.write(
        content, samples, sample_rate, format="FLAC", subtype="PCM_16", compression_level=FASTEST
    )
    return content.getvalue()


def stored_column(names: Sequence[str]) -> str:
    """Return the column, of those of a prepared split, that holds its audio."""
    return next(name for name in (*COLUMNS.values(), SHARDED) if name in names)


def read_rows(
    split: datasets.Dataset, rows: Sequence[int], at_once: int = 50
) -> Iterator[dict[str, Any]]:
    """Yield rows of a prepared split; what lies in shards is fetched for ``at_once`` of them.

    Raises:
        SbkitError: a shard is missing, cut short or damaged.
    """
    for start in range(0, len(rows), at_once):
        columns = split[rows[start : start + at_once]]
        if SHARDED in columns:
            places = columns.pop(SHARDED)
            columns[COLUMNS[places[0]["store"]]] = _fetch(places)
        for row in zip(*columns.values(), strict=True):
            yield dict(zip(columns, row, strict=True))


def _fetch(places: Sequence[Mapping[str, Any]]) -> list[bytes]:
    stored = read_ranges([ByteRange(each["file"], each["start"], each["size"]) for each in places])
    for place, content in zip(places, stored, strict=True):
        if zlib.crc32(content) != place["crc32"]:
            raise SbkitError(
                f"{place['file']} must hold what was prepared, but is damaged (the checksum of "
                f"bytes {place['start']} to {place['start'] + place['size']} is another). Copy it "
                "again, or prepare it again."
            )
    return stored


def read_clips(
    split: datasets.Dataset, rows: Sequence[int], at_once: int = 50
) -> Iterator[Samples]:
    """Yield the audio of rows of a prepared split, (S,) each; raises SbkitError as both below."""
    clips = split.select_columns(["id", "samples", stored_column(split.column_names)])
    for clip in read_rows(clips, rows, at_once):
        yield np.frombuffer(read_stored(clip), "<i2")


def read_stored(row: Mapping[str, Any]) -> bytes:
    """Return the audio of a row of a prepared split, (S,) as little-endian int16.

    Raises:
        SbkitError: the clip is not as long as it was when it was prepared, or cannot be read.
    """
    column = stored_column(list(row))
    stored: bytes = row[column]
    what, fix = "prepared audio", "Prepare the data again"
    if column == COLUMNS["none"]:
        rate, _, path = stored.partition(b" ")
        what, fix = os.fsdecode(path), "Start the run again: it prepares what is new"
        stored = read_audio(what, int(rate)).astype("<i2", copy=False).tobytes()
    elif column == COLUMNS["flac"]:
        flac, stored = io.BytesIO(stored), b""  # of what cannot be decoded
        with suppress(soundfile.SoundFileError):
            samples, _ = soundfile.read(flac, row["samples"] + 1, dtype="int16")
            stored = bytes(samples.astype("<i2", copy=False).tobytes())
    if len(stored) != 2 * row["samples"]:
        raise SbkitError(
            f"A clip must be as long as when it was prepared ({row['samples']} samples), but "
            f"{row['id']} has {len(stored) / 2:g} in {what}. {fix}."
        )
    return stored
