"""Intervals that hold the true rate as often as they say."""

import numpy as np
import pytest

from sbkit.evaluate.intervals import Interval, Units, rate_interval, units_of
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import describe_results
from sbkit.tasks.utterance_classification import Classified, accuracy_figures, describe_accuracy

SPEAKERS = Units(name="speaker", groups=tuple(f"s{n}" for n in range(60) for _ in range(8)))


def clips(count: int) -> Units:
    """Let every utterance be a unit of its own."""
    return Units(name="clip", groups=tuple(map(str, range(count))))


def simulate(random: np.random.Generator, mean: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw the errors and words of 60 speakers, each with a rate of their own."""
    rates = random.beta(20 * mean, 20 * (1 - mean), 60)
    totals = random.integers(3, 15, (60, 8))
    return random.binomial(totals, rates[:, None]).ravel(), totals.ravel()


def holds(interval: Interval, value: float) -> bool:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= value <= interval.high


def test_an_interval_over_speakers_holds_the_true_rate_in_95_percent() -> None:
    random, by_speaker, by_clip = np.random.default_rng(0), 0, 0
    for seed in range(1000):
        errors, totals = simulate(random, mean=0.2)
        by_speaker += holds(rate_interval(errors, totals, SPEAKERS, draws=500, seed=seed), 0.2)
        by_clip += holds(rate_interval(errors, totals, clips(480), draws=100, seed=seed), 0.2)
    assert 930 <= by_speaker <= 970
    assert by_clip < 900  # clips of one speaker are no independent evidence


def test_the_same_clips_in_another_order_have_the_same_interval() -> None:
    errors, totals = simulate(np.random.default_rng(3), mean=0.2)
    order = np.random.default_rng(4).permutation(480)
    shuffled = Units(name="speaker", groups=tuple(SPEAKERS.groups[each] for each in order))
    first = rate_interval(errors, totals, SPEAKERS)
    assert rate_interval(errors[order], totals[order], shuffled) == first
    assert rate_interval(errors, totals, SPEAKERS, seed=1) != first
    assert (first.unit, first.unit_count) == ("speaker", 60)


def test_where_nothing_can_be_drawn_there_is_no_interval() -> None:
    speaker = Units(name="speaker", groups=("ann", "ann"))
    for totals, units in (([5, 5], speaker), ([5], clips(1)), ([], clips(0)), ([0, 0], clips(2))):
        found = rate_interval(np.ones(len(totals), int), np.array(totals, int), units)
        assert (found.low, found.high, found.unit) == (None, None, units.name)


def test_a_draw_of_empty_references_is_finite() -> None:
    found = rate_interval(np.array([1, 0]), np.array([0, 4]), clips(2))
    assert (found.low, found.high) == (0.0, 2.0)  # two insertions, as `ErrorCounts.rate` has it


@pytest.mark.parametrize(
    ("speakers", "name", "count"),
    [
        (["ann", "bob", "ann"], "speaker", 2),
        (["ann", "ann", "ann"], "clip", 3),  # nothing is known of other speakers
        (["", "", ""], "clip", 3),
        (["ann", "", "ann"], "speaker or clip", 2),
    ],
)
def test_speakers_are_drawn_where_they_are_known(
    speakers: list[str], name: str, count: int
) -> None:
    units = units_of(["1", "2", "3"], speakers)
    assert (units.name, len({*units.groups})) == (name, count)


# Twenty clips of two speakers: Ann's are all right, of Bob's every second word is wrong.
SET = [ScoredUtterance(f"ann{n}", "a b", "a b", speaker="ann") for n in range(10)]
SET += [ScoredUtterance(f"bob{n}", "a b", "a c", speaker="bob") for n in range(10)]


def test_the_line_of_a_test_set_names_what_was_drawn() -> None:
    words = "WER 25.0 % (10 / 40 words; 0.0 to 50.0, only 2 speakers)"
    assert describe_results(SET).endswith(f", {words}")
    assert describe_results(SET[:1]).endswith("(0 / 2 words; no interval over 1 clip)")


def test_an_accuracy_has_its_interval() -> None:
    answers = [Classified(str(n), "a", "ab"[n % 4 == 0], speaker=str(n % 20)) for n in range(40)]
    assert describe_accuracy(answers) == "accuracy 75.0 % (30 / 40; 55.0 to 95.0, 20 speakers)"
    figures = accuracy_figures(answers)
    assert (figures["accuracy"], figures["right"], figures["utterances"]) == (0.75, 30, 40)
    assert figures["accuracy_interval"]["unit_count"] == 20
    assert accuracy_figures([])["accuracy_interval"]["low"] is None
