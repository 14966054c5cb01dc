"""MAPSSWE: do two recognizers make different numbers of word errors on the same references?

The matched-pair sentence-segment word error test of Gillick & Cox (ICASSP 1989), as NIST's
sc_stats does it. Segments are cut where both have two correct words in a row, so that an error in
one says little about the next; those without an error are left out. Of each, the difference of
the error counts is taken: Z = mean / (sd / sqrt n).

Segments count as independent, even those of one speaker. Whether a difference holds for other
speakers is what the interval of the difference shows (`sbkit/evaluate/interval.py`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.evaluate.wer import split_units

BOUNDARY_WORDS = 2  # correct in both, as sc_stats has it
SUBSTITUTION, DELETION, INSERTION = 4, 3, 3  # what they cost in an alignment of sclite

Counts = npt.NDArray[np.int64]


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
