"""What is kept of each clip's audio, by the knob ``audio_store``, and how it is read again.

pcm   int16 samples: nothing is decoded again; 115 MB for an hour at 16 kHz
flac  the same samples without loss in about half the room, decoded when they are read
none  the path of the clip's own file, which is decoded when it is read: no room at all

Each has a column of its own in a prepared split, which holds bytes; `read_stored` makes samples of
any of them.
"""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sbkit.audio.io import read_audio
from sbkit.base.errors import SbkitError

COLUMNS = {"pcm": "audio", "flac": "audio_flac", "none": "audio_file"}
FASTEST = 0.0  # of FLAC's compressions; the highest takes four times as long for 3 % less


def require_store(name: object) -> str:
    """Return the name of a store; raises SbkitError where it is none."""
    if name not in COLUMNS:
        raise SbkitError(
            f"`audio_store` must be one of {', '.join(COLUMNS)}, but is {name!r}. Choose pcm for "
            "speed, flac for half the disk, none for no disk."
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
    return next(name for name in COLUMNS.values() if name in names)


def read_stored(row: Mapping[str, Any]) -> bytes:
    """Return the audio of a row of a prepared split, (S,) as little-endian int16.

    Raises:
        SbkitError: the clip is not as long as it was when it was prepared, or cannot be read.
    """
    column = stored_column(list(row))
    stored: bytes = row[column]
    if column == COLUMNS["pcm"]:
        return stored
    if column == COLUMNS["flac"]:
        samples, _ = soundfile.read(io.BytesIO(stored), dtype="int16")
        what = "prepared audio"
    else:
        rate, _, path = stored.partition(b" ")
        what = os.fsdecode(path)
        samples = read_audio(what, int(rate))
    if len(samples) != row["samples"]:
        raise SbkitError(
            f"A clip must be as long as when it was prepared ({row['samples']} samples), but "
            f"{row['id']} has {len(samples)} in {what}. Start the run again: it prepares what is "
            "new."
        )
    return bytes(samples.astype("<i2", copy=False).tobytes())
