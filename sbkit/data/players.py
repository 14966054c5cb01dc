"""The audio of chosen rows of a prepared split as MP3, which every browser plays, for pages.

One second of telephone prompts at 16 kHz is 3.7 kB by libsndfile's MP3 at the compression below and
5.6 kB at its usual one; Opus is as small and takes five times as long to encode.
"""

import base64
import io
from collections.abc import Sequence

import datasets
import soundfile

from sbkit.audio.io import Samples
from sbkit.base.errors import SbkitError
from sbkit.data.corpora.columns import take_columns
from sbkit.data.storage.audio_store import read_clips

RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # Hz, of MPEG
COMPRESSION = 0.9  # of libsndfile, from 0 to 1


def encode_mp3(audio: Samples, sample_rate: int) -> bytes:
    """Return audio (S,) int16 at one of `RATES` as MP3."""
    content = io.BytesIO()
    soundfile.write(content, audio, sample_rate, format="MP3", compression_level=COMPRESSION)
    return content.getvalue()


def encode_clips(
    split: datasets.Dataset,
    ids: Sequence[str],
    *,
    sample_rate: int,
    longest: float,
    budget: float = float("inf"),
) -> dict[str, str]:
    """Return MP3 in base64 by id, in the order of ``ids``, until ``budget`` characters are full.

    A clip is cut after ``longest`` seconds. Those that are not there, or whose audio cannot be read
    any more, are left out; all are where MP3 does not have the rate.
    """
    if sample_rate not in RATES:
        return {}
    row_of = {id: row for row, id in enumerate(take_columns(split, "id")["id"].to_pylist())}
    found: dict[str, str] = {}
    for id in ids:
        if id not in row_of:
            continue
        try:
            (audio,) = read_clips(split, [row_of[id]])
        except SbkitError:
            continue
        content = encode_mp3(audio[: int(longest * sample_rate)], sample_rate)
        encoded = base64.b64encode(content).decode()
        budget -= len(encoded)
        if budget < 0:
            break
        found[id] = encoded
    return found
