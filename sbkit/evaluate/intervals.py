"""Intervals of error rates, and a test of whether two recognizers differ.

The 95 % interval of a rate is from a bootstrap over speakers, because clips of one speaker fail
together, or over clips if the speakers are unknown. A resample draws as many units as there are,
with replacement, and its rate is all its errors divided by all its words. The ends are the 2.5 and
97.5 percentiles (Bisani & Ney, ICASSP 2004). An interval over clips says nothing about speakers
who are not in the test, and an interval over few units is too narrow: in 1,000 simulations of
speakers with individual rates, intervals over 2, 5, 10, 20 and 60 speakers contained the true rate
in 51, 84, 90, 93 and 94 %.

MAPSSWE is the matched-pair sentence-segment word error test of Gillick & Cox (ICASSP 1989), as in
NIST's sc_stats: do two recognizers make different numbers of errors on the same references?
Segments are cut where both have two correct words in a row, so that an error in one segment says
little about the next. Segments without an error are left out. Z = mean / (sd / sqrt n) of the
differences of the error counts. Segments count as independent, even within one speaker; the
interval of a difference shows whether it holds for other speakers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Counts, Float64s
from sbkit.evaluate.wer import ErrorCounts, FigureDict, split_units

NUM_DRAWS = 10_000
UNITS_AT_ONCE = 1 << 20  # drawn together, 8 MB; all draws of 20,000 clips would be 1.6 GB
MIN_UNITS = 10  # an interval over fewer contains the true rate in less than 90 %
BOUNDARY_WORDS = 2  # between segments, correct in both, as in sc_stats
MIN_SEGMENTS = 50  # with fewer, Z may not be normal (Gillick and Cox, 1989)
SUBSTITUTION, DELETION, INSERTION = 4, 3, 3  # costs of sclite's alignment


class Grouping(NamedTuple):
    """What the bootstrap draws; unit: as in `Interval`; groups: the group of each utterance."""

    unit: str
    groups: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A 95 % interval, in fractions; both ends are None for fewer than two units or no words.

    unit: "speaker", "clip" or "speaker or clip"; unit_count: the number of units.

    >>> counts = [ErrorCounts(substitutions=n % 3, reference_length=9) for n in range(40)]
    >>> print(interval_of(counts, group_by_speaker([str(n) for n in range(40)], [""] * 40)))
    8.1 to 13.6, 40 clips
    """

    low: float | None
    high: float | None
    unit: str
    unit_count: int

    def __str__(self) -> str:
        """Format the interval in percent with its units: "31.4 to 50.2, 65 clips"."""
        ends = self.format_ends()
        return ends if self.low is None else f"{ends}, {self.describe_units()}"

    def format_ends(self) -> str:
        """Format the interval in percent."""
        if self.low is None or self.high is None:
            return f"no interval over {self._count_units()}"
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}"

    def describe_units(self) -> str:
        """Format the number of units, with "only" if an interval over so few is too narrow."""
        return f"{'only ' if self.unit_count < MIN_UNITS else ''}{self._count_units()}"

    def _count_units(self) -> str:
        units = " or ".join(f"{name}s" for name in self.unit.split(" or "))
        return f"{self.unit_count} {self.unit if self.unit_count == 1 else units}"


def group_by_speaker(ids: Sequence[str], speakers: Sequence[str]) -> Grouping:
    """Group utterances by speaker; each clip whose speaker is "" (unknown) is a group of its own.

    If there is only one speaker, who cannot be resampled, clips are the groups.
    """
    clips = tuple(f"clip {id}" for id in ids)
    pairs = zip(clips, speakers, strict=True)
    groups = tuple(f"speaker {speaker}" if speaker else clip for clip, speaker in pairs)
    if len(set(groups)) < 2 or not any(speakers):
        return Grouping("clip", clips)
    return Grouping("speaker" if all(speakers) else "speaker or clip", groups)


def interval_of(
    counts: Sequence[ErrorCounts], grouping: Grouping, *, minus: Sequence[ErrorCounts] = ()
) -> Interval:
    """Compute the interval of a rate from the counts of each utterance.

    With ``minus``, the counts of another system on the same references, compute the interval of the
    difference of both rates. Both rates of a draw are from the same units, so the units' difficulty
    cancels out.
    """
    errors = np.array([count.errors for count in counts], dtype=np.int64)
    if minus:
        errors -= [count.errors for count in minus]
    lengths = np.array([count.reference_length for count in counts], dtype=np.int64)
    return rate_interval(errors, lengths, grouping)


def rate_interval(
    errors: Counts, totals: Counts, grouping: Grouping, *, draws: int = NUM_DRAWS, seed: int = 0
) -> Interval:
    """Compute the interval of the rate ``errors.sum() / totals.sum()``: (N,), (N,), N utterances.

    The same input in any order gives the same interval.
    """
    names, unit_of = np.unique(np.array(grouping.groups, dtype=np.str_), return_inverse=True)
    unit_counts = np.zeros((len(names), 2), dtype=np.int64)
    np.add.at(unit_counts, unit_of, np.stack([errors, totals], axis=1))
    ends: Sequence[float | None] = (None, None)
    if len(names) > 1 and totals.any():
        rates = np.concatenate([*_resample(unit_counts, draws, seed)])
        ends = np.quantile(rates, (0.025, 0.975)).tolist()
    return Interval(low=ends[0], high=ends[1], unit=grouping.unit, unit_count=len(names))


def _resample(unit_counts: Counts, draws: int, seed: int) -> Iterator[Float64s]:
    """Yield the rates of all draws in blocks; a draw of empty references divides by one."""
    random = np.random.default_rng(seed)
    num_units = len(unit_counts)
    errors, totals = unit_counts.T.copy()
    step = max(1, UNITS_AT_ONCE // num_units)
    for first in range(0, draws, step):
        drawn = random.integers(num_units, size=(min(step, draws - first), num_units))
        yield errors.take(drawn).sum(1) / np.maximum(totals.take(drawn).sum(1), 1)


# ---- MAPSSWE


def mapsswe(triples: Iterable[tuple[str, str, str]], *, by_words: bool = True) -> FigureDict:
    """Test whether A and B differ, from (reference, A's transcript, B's) of each utterance.

    Returns the number of segments, the mean difference A - B, Z and the two-sided p. If no test is
    possible, Z and p are None, and `reason` says why. Characters replace words in a language
    without spaces between words. Segments and Z equal sc_stats' (SCTK 2.4.10). p assumes that Z
    is normal.
    """
    segments = (segment_differences(*triple, by_words=by_words) for triple in triples)
    differences = [*chain.from_iterable(segments)]
    count = len(differences)
    mean = float(np.mean(differences)) if differences else 0.0
    figures = {"segments": count, "mean": mean, "z": None, "p": None}
    if count < 2:
        return {
            **figures,
            "reason": f"needs at least 2 segments with errors, but there are {count}",
        }
    error = float(np.std(differences, ddof=1)) / math.sqrt(count)
    if error == 0 and mean != 0:
        return {**figures, "reason": f"all {count} segments have the same difference, {mean:+g}"}
    z = mean / error if error else 0.0
    return {**figures, "z": z, "p": math.erfc(abs(z) / math.sqrt(2))}


def segment_differences(
    reference: str, hypothesis_a: str, hypothesis_b: str, *, by_words: bool = True
) -> list[int]:
    """Return A's errors minus B's in every segment of an utterance that has an error."""
    words, *hypotheses = (
        split_units(text, by_words=by_words) for text in (reference, hypothesis_a, hypothesis_b)
    )
    pairs = [_errors(words, hypothesis) for hypothesis in hypotheses]
    inserted, wrong = (np.stack(arrays, axis=1) for arrays in zip(*pairs, strict=True))
    differences: list[int] = []
    errors = np.zeros(2, dtype=np.int64)
    num_correct = 0
    for insertions, is_wrong in zip(inserted, wrong, strict=True):
        num_correct = 0 if is_wrong.any() else 1 if insertions.any() else num_correct + 1
        errors += insertions + is_wrong
        if num_correct == BOUNDARY_WORDS and errors.any():
            differences.append(int(errors[0] - errors[1]))
            errors[:] = 0
    return [*differences, int(errors[0] - errors[1])] if errors.any() else differences


def _errors(reference: Sequence[str], hypothesis: Sequence[str]) -> tuple[Counts, Counts]:
    """Count the insertions before each word of the reference, and mark the wrong words.

    Both are (N + 1,) for N words; the last entry is for the end. If several alignments have the
    lowest cost, sclite's is taken: it goes back from the end and pairs two words wherever that is
    cheapest. The alignments of rapidfuzz have as many errors, but cut 86 segments where sc_stats
    cuts 90.
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
            row = row - 1
            column = column - 1
            wrong[row] = is_wrong
        elif row and cost == costs[row - 1][column] + DELETION:
            row -= 1
            wrong[row] = 1
        else:
            column -= 1
            inserted[row] += 1
    return inserted, wrong


def _costs(reference: Sequence[str], hypothesis: Sequence[str]) -> Counts:
    """Return the minimal cost of aligning each prefix of one text with each of the other."""
    words = np.array(hypothesis, dtype=object)
    inserted = INSERTION * np.arange(len(hypothesis) + 1)
    costs = np.empty((len(reference) + 1, len(hypothesis) + 1), dtype=np.int64)
    costs[0] = inserted
    for above, row, word in zip(costs, costs[1:], reference, strict=False):
        row[:] = above + DELETION
        np.minimum(row[1:], above[:-1] + SUBSTITUTION * (words != word), out=row[1:])
        # The lowest cost of any entry to the left, plus the insertions from there.
        row[:] = np.minimum.accumulate(row - inserted) + inserted
    return costs
