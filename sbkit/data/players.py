"""The audio of chosen rows of a prepared split, for pages that play it."""

from collections.abc import Sequence

import datasets
import numpy as np

from sbkit.audio.mp3 import RATES, encode_mp3
from sbkit.base.errors import SbkitError
from sbkit.data.audio_store import read_rows, read_stored
from sbkit.data.columns import take_columns


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
            (row,) = read_rows(split, [row_of[id]])
            audio = np.frombuffer(read_stored(row), "<i2")
        except SbkitError:
            continue
        encoded = encode_mp3(audio[: int(longest * sample_rate)], sample_rate)
        budget -= len(encoded)
        if budget < 0:
            break
        found[id] = encoded
    return found
