"""Clips for pages that play them."""

import base64
import io

import datasets
import pytest
import soundfile

from sbkit.data.report import encode_clips
from tests.stores import Utterance, make_store


@pytest.fixture(scope="module")
def split() -> datasets.Dataset:
    """Make three clips of 1, 2 and 3 seconds, of which the last is cut short."""
    audio = [bytes(2 * 16_000 * seconds) for seconds in (1, 2, 2)]
    rows = zip("abc", (16_000, 32_000, 48_000), audio, strict=True)
    return make_store((Utterance(id, "", "", "", n, each) for id, n, each in rows), "flac")


def seconds_of(clip: str) -> float:
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(clip)))
    return len(samples) / rate


def test_clips_come_in_the_order_that_is_asked_for(split: datasets.Dataset) -> None:
    clips = encode_clips(split, ["b", "none", "c", "a"], sample_rate=16_000, max_seconds=1.5)
    assert {id: seconds_of(clip) for id, clip in clips.items()} == {"b": 1.5, "a": 1.0}
    assert [*clips] == ["b", "a"]


def test_a_budget_is_kept(split: datasets.Dataset) -> None:
    options = {"sample_rate": 16_000, "max_seconds": 30.0}
    (size,) = map(len, encode_clips(split, ["a"], **options).values())
    assert [*encode_clips(split, ["a", "b"], max_characters=size, **options)] == ["a"]
    assert encode_clips(split, ["a", "b"], max_characters=size - 1, **options) == {}
