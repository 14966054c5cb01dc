"""Where the audio of a prepared split lies, and how its samples are read.

`audio_store` names what is kept of each clip:

pcm   WAV of int16: nothing is decoded again; 115 MB for an hour at 16 kHz
flac  the same samples in six tenths of the space, decoded when they are read
none  nothing: the clip's own file is decoded when it is read

The column `audio` of a prepared split holds a `PLACE` for each row: some bytes of a shard, in the
cache or at a URL, or the clip's own file.

Decode many clips on all cores, and show how many are done.
"""

import hashlib
import io
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import soundfile
import torch

from sbkit.audio.io import AudioError, Samples, read_audio
from sbkit.base.errors import SbkitError
from sbkit.base.machine import usable_cores
from sbkit.data.storage.filesystem import read_ranges
from sbkit.logs.progress import shown

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
