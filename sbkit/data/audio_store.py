"""What is kept of each clip's audio, by the knob ``audio_store``, and how it is read again.

pcm   int16 samples: nothing is decoded again; 115 MB for an hour at 16 kHz
flac  the same samples without loss in about half the room, decoded when they are read
none  the path of the clip's own file, which is decoded when it is read: no room at all

Each kind is a string of bytes, the column ``audio`` of a prepared split. Whoever reads the column
gets samples.
"""

import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import soundfile

from sbkit.audio.io import read_audio
from sbkit.base.errors import SbkitError

STORES = ("pcm", "flac", "none")
FASTEST = 0.0  # of FLAC's compressions; the highest takes four times as long for 3 % less


def require_store(name: object) -> str:
    """Return the name of a store; raises SbkitError where it is none."""
    if name not in STORES:
        raise SbkitError(
            f"`audio_store` must be one of {', '.join(STORES)}, but is {name!r}. Choose pcm for "
            "speed, flac for half the disk, none for no disk."
        )
    return str(name)


def to_stored(audio: bytes, path: Path, *, store: str, sample_rate: int) -> bytes:
    """Return what is kept of a clip: its samples (S,) as little-endian int16 -> bytes."""
    if store == "pcm":
        return audio
    if store == "none":
        return os.fsencode(path)
    content = io.BytesIO()
    samples = np.frombuffer(audio, "<i2")
    soundfile.write(
        content, samples, sample_rate, format="FLAC", subtype="PCM_16", compression_level=FASTEST
    )
    return content.getvalue()


def reading(dataset: datasets.Dataset, *, store: str, sample_rate: int) -> datasets.Dataset:
    """Return the dataset with a column ``audio`` that is read as samples, little-endian int16."""
    if store == "pcm":
        return dataset
    read = _from_flac if store == "flac" else partial(_from_file, sample_rate=sample_rate)
    return dataset.with_transform(partial(_read_audio, read=read))


def _read_audio(
    columns: dict[str, list[Any]], read: Callable[[bytes, int | None], bytes]
) -> dict[str, list[Any]]:
    if "audio" not in columns:
        return columns
    lengths = columns.get("samples") or [None] * len(columns["audio"])
    audio = [read(stored, length) for stored, length in zip(columns["audio"], lengths, strict=True)]
    return {**columns, "audio": audio}


def _from_flac(stored: bytes, length: int | None) -> bytes:
    samples, _ = soundfile.read(io.BytesIO(stored), dtype="int16")
    if length is not None and len(samples) != length:
        raise SbkitError(
            f"Prepared audio must be as long as its listing says ({length} samples), but has "
            f"{len(samples)}. Remove it: sbkit cache prune --older-than=0"
        )
    return bytes(samples.astype("<i2", copy=False).tobytes())


def _from_file(stored: bytes, length: int | None, sample_rate: int) -> bytes:
    path = os.fsdecode(stored)
    audio = read_audio(path, sample_rate).astype("<i2", copy=False).tobytes()
    if length is not None and len(audio) != 2 * length:
        raise SbkitError(
            f"With `audio_store: none` the clips must stay as they were prepared, but {path} has "
            f"{len(audio) // 2} samples where it had {length}. Start the run again."
        )
    return bytes(audio)
