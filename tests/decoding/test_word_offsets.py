"""Words reach into the pauses around them, and never over each other or out of their clip."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.decoding.alignment import TimedToken, TimedWord, WordOffsets

STEP = 10


def timed(spans: Sequence[tuple[int, int]]) -> list[TimedWord]:
    return [TimedWord("a", (TimedToken(1, *span),)) for span in spans]


def place(spans: Sequence[tuple[int, int]], *, start: float, end: float, frames: int = 100) -> Any:
    return WordOffsets(start, end).place(timed(spans), samples=frames * STEP, step=STEP)


def test_a_word_between_pauses_grows_by_both_offsets() -> None:
    assert place([(20, 25), (60, 61)], start=-1.5, end=3.25) == [(185, 282), (585, 642)]


def test_words_without_a_pause_meet_in_the_middle_of_their_tokens() -> None:
    assert place([(20, 25), (28, 30)], start=-1.0, end=3.0) == [(190, 265), (265, 330)]


def test_no_word_leaves_its_clip() -> None:
    """A front-end that pads makes frames that end after the audio."""
    assert place([(0, 98)], start=-1.0, end=3.0) == [(0, 1000)]
    assert WordOffsets(0, 0).place(timed([(0, 2)]), samples=17, step=STEP) == [(0, 17)]
    assert place([], start=-1.0, end=3.0) == []


def test_words_follow_each_other_whatever_the_offsets() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        cuts = np.sort(random.choice(60, 2 * random.integers(1, 9), replace=False))
        start, end = random.uniform(-25, 25, 2).tolist()
        found = place(cuts.reshape(-1, 2).tolist(), start=start, end=end, frames=60)
        bounds = np.ravel(found)
        assert (np.diff(bounds) >= 0).all()
        assert bounds.min() >= 0
        assert bounds.max() <= 60 * STEP


@pytest.mark.parametrize(
    "value", [{"start": 1}, {"start": "1", "end": 2}, {"start": 0, "end": 99}, [1, 2], {}]
)
def test_what_is_no_pair_of_offsets_is_refused(value: object) -> None:
    with pytest.raises(SbkitError, match="`word_offsets"):
        WordOffsets.of(value)


def test_not_a_number_is_refused() -> None:
    with pytest.raises(SbkitError, match=r"`word_offsets.end` must be a number of frames"):
        WordOffsets.of({"start": 0, "end": float("nan")})
