"""A 95 % interval of an error rate, from a bootstrap over speakers or clips.

Clips of one speaker fail together, so speakers are drawn where they are known: a resample is as
many units as there are, with replacement, and its rate is all its errors divided by all its words.
The ends are the 2.5 % and 97.5 % percentiles (Bisani & Ney, ICASSP 2004).

An interval over clips says nothing about speakers who are not in the test, and one of few units is
too narrow: in 1,000 simulations of speakers with rates of their own, intervals of 2, 5, 10, 20 and
60 speakers held the true rate in 51, 84, 90, 93 and 94 %.

MAPSSWE: do two recognizers make different numbers of word errors on the same references?

The matched-pair sentence-segment word error test of Gillick & Cox (ICASSP 1989), as NIST's
sc_stats does it. Segments are cut where both have two correct words in a row, so that an error in
one says little about the next; those without an error are left out. Of each, the difference of
the error counts is taken: Z = mean / (sd / sqrt n).

Segments count as independent, even those of one speaker. Whether a difference holds for other
speakers is what the interval of the difference shows (`sbkit/evaluate/intervals.py`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.evaluate.wer import ErrorCounts, split_units

DRAWS = 10_000
CHUNK = 1 << 20  # units drawn at a time, 8 MB; all draws of 20,000 clips would be 1.6 GB
FEW = 10  # units; an interval over fewer holds the true rate in less than 90 %

Counts = npt.NDArray[np.int64]  # one for each utterance, or for each unit
Rates = npt.NDArray[np.float64]  # one for each draw


class Units(NamedTuple):
    """What is drawn: what the units are, in the singular, and the unit of each utterance."""

    name: str
    groups: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A 95 % interval, in fractions; both ends are None where there is nothing to draw from.

    ``unit`` is what was drawn, in the singular; ``unit_count`` how many of them there are.
    """

    low: float | None
    high: float | None
    unit: str
    unit_count: int

    def __str__(self) -> str:
        """Write it in percent, and what was drawn: "31.4 to 50.2, 65 clips"."""
        if self.low is None or self.high is None:
            return f"no interval over {self.unit_count} {self.unit}"
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}, {self.describe_units()}"

    def describe_units(self) -> str:
        """Write how many units were drawn, "only" where an interval over so few is too narrow."""
        plural = " or ".join(f"{each}s" for each in self.unit.split(" or "))
        return f"{'only ' if self.unit_count < FEW else ''}{self.unit_count} {plural}"


def units_of(ids: Sequence[str], speakers: Sequence[str]) -> Units:
    """Return the speaker of each utterance where one is known, else the clip itself.

    ``speakers`` holds "" where none is known. A single speaker cannot be resampled: then clips are.
    """
    clips = tuple(f"clip {id}" for id in ids)
    groups = tuple(
        f"speaker {speaker}" if speaker else clip
        for clip, speaker in zip(clips, speakers, strict=True)
    )
    if len(set(groups)) < 2 or not any(speakers):
        return Units("clip", clips)
    return Units("speaker" if all(speakers) else "speaker or clip", groups)


def interval_of(
    counts: Sequence[ErrorCounts], units: Units, *, minus: Sequence[ErrorCounts] = ()
) -> Interval:
    """Compute the interval of a rate from the counts of each utterance.

    With the counts of another system on the same references, ``minus``, of the difference of the
    two rates: both rates of a draw are of the same units, so that what is hard for both cancels.
    """
    errors = np.array([each.errors for each in counts], dtype=np.int64)
    if minus:
        errors -= [each.errors for each in minus]
    return rate_interval(errors, np.array([each.total for each in counts], dtype=np.int64), units)


def rate_interval(
    errors: Counts, totals: Counts, units: Units, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Compute the interval of the rate ``errors.sum() / totals.sum()``: (N,), (N,), N units.

    The same input gives the same interval, also in another order.
    """
    names, unit_of = np.unique(np.array(units.groups, dtype=np.str_), return_inverse=True)
    of_units = np.zeros((len(names), 2), dtype=np.int64)
    np.add.at(of_units, unit_of, np.stack([errors, totals], axis=1))
    low: float | None = None
    high: float | None = None
    if len(names) > 1 and totals.any():
        rates = np.concatenate([*_resampled(of_units, draws, seed)])
        low, high = np.quantile(rates, (0.025, 0.975)).tolist()
    return Interval(low=low, high=high, unit=units.name, unit_count=len(names))


def _resampled(of_units: Counts, draws: int, seed: int) -> Iterator[Rates]:
    """Yield the rates of all draws, some at a time; a draw of empty references divides by one."""
    random, units = np.random.default_rng(seed), len(of_units)
    errors, totals = of_units.T.copy()
    step = max(1, CHUNK // units)
    for first in range(0, draws, step):
        drawn = random.integers(units, size=(min(step, draws - first), units))
        yield errors.take(drawn).sum(1) / np.maximum(totals.take(drawn).sum(1), 1)


BOUNDARY_WORDS = 2  # correct in both, as sc_stats has it
SUBSTITUTION, DELETION, INSERTION = 4, 3, 3  # what they cost in an alignment of sclite


def mapsswe(triples: Iterable[tuple[str, str, str]], *, by_words: bool = True) -> dict[str, Any]:
    """Test whether A and B differ, from (reference, A's transcript, B's) of each utterance.

    Returns the number of segments, the mean difference A - B, Z and the two-sided p; where there is
    no test these two are None, and `reason` says why.
    Characters take the place of words where a language writes no spaces between them.
    Segments and Z equal those of sc_stats (SCTK 2.4.10). p takes Z as normal, for which Gillick &
    Cox ask for some fifty segments.
    """
    differences = [
        each for triple in triples for each in segment_differences(*triple, by_words=by_words)
    ]
    count = len(differences)
    mean = float(np.mean(differences)) if differences else 0.0
    found = {"segments": count, "mean": mean, "z": None, "p": None}
    if count < 2:
        reason = f"there must be at least 2 segments with errors, but there are {count}"
        return {**found, "reason": reason}
    error = float(np.std(differences, ddof=1)) / math.sqrt(count)
    if error == 0 and mean != 0:
        reason = f"segments must differ, but all {count} have the same difference, {mean:+g}"
        return {**found, "reason": reason}
    z = mean / error if error else 0.0
    return {**found, "z": z, "p": math.erfc(abs(z) / math.sqrt(2))}


def segment_differences(
    reference: str, hypothesis_a: str, hypothesis_b: str, *, by_words: bool = True
) -> list[int]:
    """Return A's errors minus B's in every segment of one utterance that has an error."""
    words, *both = (
        split_units(each, by_words=by_words) for each in (reference, hypothesis_a, hypothesis_b)
    )
    errors_of_both = [_errors(words, each) for each in both]
    inserted, missed = (np.stack(each, axis=1) for each in zip(*errors_of_both, strict=True))
    differences: list[int] = []
    errors, correct = np.zeros(2, dtype=np.int64), 0
    for before, here in zip(inserted, missed, strict=True):
        correct = 0 if here.any() else 1 if before.any() else correct + 1
        errors += before + here
        if correct == BOUNDARY_WORDS and errors.any():
            differences.append(int(errors[0] - errors[1]))
            errors[:] = 0
    return [*differences, int(errors[0] - errors[1])] if errors.any() else differences


def _errors(reference: Sequence[str], hypothesis: Sequence[str]) -> tuple[Counts, Counts]:
    """Count the insertions before each word of the reference, and mark the words that are wrong.

    Both (N + 1,) of N words: the last place is behind them all. Of equally cheap alignments it is
    sclite's, which goes back from the end and pairs two words wherever that is cheapest: those of
    rapidfuzz have as many errors, but cut 86 segments where sc_stats has 90.
    """
    inserted, wrong = np.zeros((2, len(reference) + 1), dtype=np.int64)
    if reference == hypothesis:
        return inserted, wrong
    costs = _costs(reference, hypothesis)
    row, column = len(reference), len(hypothesis)
    while row or column:
        cost = costs[row][column]
        is_wrong = bool(row and column) and reference[row - 1] != hypothesis[column - 1]
        if row and column and cost == costs[row - 1][column - 1] + SUBSTITUTION * is_wrong:
            row, column = row - 1, column - 1
            wrong[row] = is_wrong
        elif row and cost == costs[row - 1][column] + DELETION:
            row -= 1
            wrong[row] = 1
        else:
            column -= 1
            inserted[row] += 1
    return inserted, wrong


def _costs(reference: Sequence[str], hypothesis: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the least cost of aligning each beginning of the one with each of the other."""
    found = np.array(hypothesis, dtype=object)
    inserted = INSERTION * np.arange(len(hypothesis) + 1)
    costs = np.empty((len(reference) + 1, len(hypothesis) + 1), dtype=np.int64)
    costs[0] = inserted
    for above, row, word in zip(costs, costs[1:], reference, strict=False):
        row[:] = above + DELETION
        np.minimum(row[1:], above[:-1] + SUBSTITUTION * (found != word), out=row[1:])
        # The least of what lies to the left, and the insertions from there on.
        row[:] = np.minimum.accumulate(row - inserted) + inserted
    return costs
