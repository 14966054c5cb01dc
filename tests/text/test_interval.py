"""An interval holds the true rate in 95 of 100 test sets, when what is alike is drawn together."""

import numpy as np
import pytest

from sbkit.text.interval import difference_interval, rate_interval


def test_the_interval_covers_the_rate_of_all_speakers() -> None:
    """60 speakers of 10 clips of 8 words, each with a rate of his own, in 1,000 test sets."""
    random = np.random.default_rng(1)
    covered = by_clip = 0
    for _ in range(1000):
        rates = random.beta(4, 12, 60)  # 0.25 on average
        errors = random.binomial(8, np.repeat(rates, 10)).tolist()
        totals, speakers = [8] * 600, np.repeat(np.arange(60), 10).astype(str).tolist()
        found = rate_interval(errors, totals, speakers)
        assert found is not None
        assert (found.unit, found.units) == ("speaker", 60)
        covered += found.low <= 0.25 <= found.high
        if _ < 100:
            clips = rate_interval(errors, totals)
            assert clips is not None
            by_clip += clips.low <= 0.25 <= clips.high
    assert 930 <= covered <= 970
    assert by_clip < 75  # clips of one voice are no independent draws


def test_an_interval_holds_its_rate_and_is_the_same_again() -> None:
    random = np.random.default_rng(2)
    errors, totals = random.integers(0, 5, 65).tolist(), random.integers(5, 9, 65).tolist()
    found = rate_interval(errors, totals)
    assert found == rate_interval(errors, totals)
    assert found is not None
    assert found.low < sum(errors) / sum(totals) < found.high
    assert str(found).endswith(", 65 clips")


@pytest.mark.parametrize(
    ("errors", "totals", "speakers", "unit"),
    [
        ([], [], None, None),
        ([1], [3], None, None),
        ([0, 0], [0, 0], None, None),
        ([1, 2], [3, 4], ["ann", "ann"], "clip"),
        ([1, 2], [3, 4], ["ann", ""], "clip"),
        ([1, 2, 0], [3, 4, 5], ["ann", "bob", "ann"], "speaker"),
    ],
)
def test_what_is_drawn(
    errors: list[int], totals: list[int], speakers: list[str] | None, unit: str | None
) -> None:
    found = rate_interval(errors, totals, speakers)
    assert (found and found.unit) == unit


def test_a_difference_is_narrower_than_its_sides() -> None:
    random = np.random.default_rng(3)
    totals = random.integers(5, 20, 200)
    one = random.binomial(totals, 0.3)
    other = np.maximum(0, one - random.binomial(1, 0.5, 200))
    both = difference_interval(one.tolist(), other.tolist(), totals.tolist())
    alone = rate_interval(one.tolist(), totals.tolist())
    assert both is not None
    assert alone is not None
    assert both.low > 0
    assert both.high - both.low < 0.5 * (alone.high - alone.low)


def test_twenty_thousand_clips_fit_into_memory() -> None:
    found = rate_interval([1] * 20_000, [4] * 20_000)
    assert found is not None
    assert found.low == found.high == 0.25
