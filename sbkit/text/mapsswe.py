"""The matched-pairs test of two recognizers: is one better, or are they alike?

Gillick and Cox, "Some statistical issues in the comparison of speech recognition algorithms"
(1989), as NIST's sc_stats does it (MAPSSWE): the words of a test set are cut into segments between
runs of words that both recognizers have right, so that errors of one segment do not depend on those
of another; the differences of their errors are then tested against zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from statistics import mean, stdev

import jiwer

GOOD_WORDS = 2  # in a row that both have right, which end a segment


@dataclass(frozen=True)
class MatchedPairs:
    """What the test says.

    segments: with an error of at least one; mean: errors of the first less those of the second, by
    segment; z: that divided by its standard error; p: two-sided. z and p are None where all
    segments are alike.
    """

    segments: int
    mean: float
    z: float | None
    p: float | None


def matched_pairs(
    references: Sequence[str], one: Sequence[str], other: Sequence[str]
) -> MatchedPairs:
    """Test two recognizers by what they made of the same utterances."""
    differences = [
        first - second
        for reference, first_text, second_text in zip(references, one, other, strict=True)
        for first, second in _segments(reference, first_text, second_text)
    ]
    if len(differences) < 2:
        return MatchedPairs(len(differences), mean(differences) if differences else 0.0, None, None)
    average, spread = mean(differences), stdev(differences)
    if spread == 0:
        return MatchedPairs(len(differences), average, None, None)
    z = average / (spread / sqrt(len(differences)))
    return MatchedPairs(len(differences), average, z, erfc(abs(z) / sqrt(2)))


def _segments(reference: str, one: str, other: str) -> Iterator[tuple[int, int]]:
    """Yield the errors of both in each segment of an utterance that has any."""
    first, second = errors_by_word(reference, one), errors_by_word(reference, other)
    errors, good = [0, 0], GOOD_WORDS
    for slot, (a, b) in enumerate(zip(first, second, strict=True)):
        is_word = slot % 2 == 1
        if a or b:
            errors = [errors[0] + a, errors[1] + b]
            good = 0
        elif is_word:
            good += 1
        if good == GOOD_WORDS and any(errors):
            yield errors[0], errors[1]
            errors = [0, 0]
    if any(errors):
        yield errors[0], errors[1]


def errors_by_word(reference: str, hypothesis: str) -> list[int]:
    """Return the errors at each place: insertions before a word, the word, before the next, ..."""
    words = reference.split()
    errors = [0] * (2 * len(words) + 1)
    aligned = jiwer.process_words(" ".join(words), " ".join(hypothesis.split())).alignments[0]
    for chunk in aligned:
        if chunk.type == "insert":
            errors[2 * chunk.ref_start_idx] += chunk.hyp_end_idx - chunk.hyp_start_idx
        elif chunk.type != "equal":
            for word in range(chunk.ref_start_idx, chunk.ref_end_idx):
                errors[2 * word + 1] += 1
    return errors
