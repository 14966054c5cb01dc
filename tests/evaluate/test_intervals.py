"""Intervals contain the true rate as often as they claim."""

import numpy as np
import pytest

from sbkit.evaluate.intervals import Grouping, Interval, group_by_speaker, rate_intervals
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import figures_of_test_set

SPEAKERS = Grouping(unit="speaker", groups=tuple(f"s{n}" for n in range(60) for _ in range(8)))


def rate_interval(
    errors: np.ndarray, totals: np.ndarray, grouping: Grouping, **options: int
) -> Interval:
    (interval,) = rate_intervals(errors[None], totals[None], grouping, **options)
    return interval


def clips(count: int) -> Grouping:
    return Grouping(unit="clip", groups=tuple(map(str, range(count))))


def simulate(random: np.random.Generator, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw the errors and words of 60 speakers, each with a rate of their own."""
    rates = random.beta(20 * mean, 20 * (1 - mean), 60)
    totals = random.integers(3, 15, (60, 8))
    return random.binomial(totals, rates[:, None]).ravel(), totals.ravel()


def contains(interval: Interval, value: float) -> bool:
    assert interval.low is not None and interval.high is not None
    return interval.low <= value <= interval.high


def test_interval_over_speakers_contains_the_true_rate_in_95_percent() -> None:
    random, by_speaker, by_clip = np.random.default_rng(0), 0, 0
    for seed in range(1000):
        errors, totals = simulate(random, mean=0.2)
        by_speaker += contains(rate_interval(errors, totals, SPEAKERS, draws=500, seed=seed), 0.2)
        by_clip += contains(rate_interval(errors, totals, clips(480), draws=100, seed=seed), 0.2)
    assert 930 <= by_speaker <= 970
    assert by_clip < 900  # clips of one speaker are not independent


@pytest.mark.parametrize("draws", [200, 30_000])  # of 60 speakers, kept and not kept
def test_rates_together_have_the_intervals_of_the_plain_definition(draws: int) -> None:
    samples = [simulate(np.random.default_rng(seed), mean=0.2) for seed in (0, 1)]
    errors, totals = np.array(samples).swapaxes(0, 1)
    intervals = rate_intervals(errors, totals, SPEAKERS, draws=draws)
    order = np.argsort([f"s{n}" for n in range(60)])
    drawn = np.random.default_rng(0).integers(60, size=(draws, 60))
    for sample, interval in zip(samples, intervals, strict=True):
        in_errors, in_totals = (row.reshape(60, 8).sum(1)[order][drawn].sum(1) for row in sample)
        low, high = np.quantile(in_errors / in_totals, (0.025, 0.975))
        assert (interval.low, interval.high) == (low, high)


def test_one_unit_has_no_interval() -> None:
    speaker = Grouping(unit="speaker", groups=("ann", "ann"))
    for totals, grouping in ([5, 5], speaker), ([5], clips(1)), ([], clips(0)), ([0, 0], clips(2)):
        interval = rate_interval(np.ones(len(totals), int), np.array(totals, int), grouping)
        assert (interval.low, interval.high, interval.unit) == (None, None, grouping.unit)


def test_draw_of_empty_references_is_finite() -> None:
    interval = rate_interval(np.array([1, 0]), np.array([0, 4]), clips(2))
    assert (interval.low, interval.high) == (0.0, 2.0)  # two insertions, as `ErrorCounts.rate`


def test_units_are_speakers_if_they_are_known() -> None:
    for speakers, name, count in (
        (["ann", "bob", "ann"], "speaker", 2),
        (["ann", "ann", "ann"], "clip", 3),  # a single speaker cannot be resampled
        (["", "", ""], "clip", 3),
        (["ann", "", "ann"], "speaker or clip", 2),
    ):
        grouping = group_by_speaker(["1", "2", "3"], speakers)
        assert (grouping.unit, len({*grouping.groups})) == (name, count)


# Twenty clips of two speakers: all words of Ann are right, every second word of Bob is wrong.
SET = [ScoredUtterance(f"ann{n}", "a b", "a b", speaker="ann") for n in range(10)]
SET += [ScoredUtterance(f"bob{n}", "a b", "a c", speaker="bob") for n in range(10)]


def test_describe_results_names_the_units() -> None:
    words = "WER 25.0 % (10 / 40 words; 0.0 to 50.0, only 2 speakers)"
    assert str(figures_of_test_set(SET)).endswith(f", {words}")
    line = str(figures_of_test_set(SET[:1]))
    assert line.endswith("(0 / 2 words; no interval over 1 clip)")
