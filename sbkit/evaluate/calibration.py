"""Measure the quality of word confidences.

Legend: N words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Bools, Float64s

NUM_BINS = 10  # of confidences, with equal width
MIN_WORDS_FOR_TWO_DIGITS = 10_000  # with 394, the AUC's 95 % interval is 0.86 to 0.94


class Bin(NamedTuple):
    """Words of similar confidence: their number, mean confidence, and share of right words."""

    words: int
    confidence: float
    right_share: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The quality of confidences.

    Attributes:
        AUC: the probability that a right word has a higher confidence than a wrong one; 0.5 by
            chance, None if all words are right or all are wrong.
        ECE: expected calibration error, the mean distance of confidence and share of right words.
        words, right: the number of words, and of right words.

    >>> print(measure_calibration([0.9, 0.8, 0.2], [True, True, False]))
    AUC 1.0, ECE 0.17 (2 right / 3 words)
    """

    AUC: float | None
    ECE: float
    words: int
    right: int

    def __str__(self) -> str:
        digits = 2 if self.words >= MIN_WORDS_FOR_TWO_DIGITS else 1
        auc = "" if self.AUC is None else f"AUC {self.AUC:.{digits}f}, "
        return f"{auc}ECE {self.ECE:.2f} ({self.right} right / {self.words} words)"


def measure_calibration(
    confidences: Sequence[float], is_right: Sequence[bool]
) -> Calibration | None:
    """Compare confidences, between 0 and 1, with the truth of each word: (N,), (N,).

    None if there are no words. Source of the ECE: Naeini, Cooper and Hauskrecht 2015.
    """
    num_words = len(confidences)
    if not num_words:
        return None
    values = np.array(confidences, np.float64)
    right_mask = np.array(is_right, np.bool_)
    num_right = int(right_mask.sum())
    has_both = 0 < num_right < num_words
    bins = reliability_bins(confidences, is_right)
    return Calibration(
        AUC=_auc(values, right_mask) if has_both else None,
        ECE=sum(b.words * abs(b.confidence - b.right_share) for b in bins) / num_words,
        words=num_words,
        right=num_right,
    )


def reliability_bins(confidences: Sequence[float], is_right: Sequence[bool]) -> tuple[Bin, ...]:
    """Sort words into tenths of the confidence scale; return the bins with words: (N,), (N,)."""
    values = np.array(confidences, np.float64)
    right_mask = np.array(is_right, np.bool_)
    tenths = np.minimum((values * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    masks = (tenths == tenth for tenth in np.unique(tenths))
    return tuple(
        Bin(int(mask.sum()), float(values[mask].mean()), float(right_mask[mask].mean()))
        for mask in masks
    )


def _auc(values: Float64s, is_right: Bools) -> float:
    """Compare every right word with every wrong one; equal confidences count half."""
    wrong_confidences = np.sort(values[~is_right])
    num_wrong_below = np.searchsorted(wrong_confidences, values[is_right], "left")
    num_wrong_at_or_below = np.searchsorted(wrong_confidences, values[is_right], "right")
    return float((num_wrong_below + num_wrong_at_or_below).mean() / (2 * len(wrong_confidences)))
