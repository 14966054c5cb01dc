"""The quality of confidences: do they separate right from wrong words, and are they calibrated?

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
    right: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The quality of confidences.

    Attributes:
        AUC: the probability that a right word has a higher confidence than a wrong one; 0.5 by
            chance, None if all words are right or all are wrong.
        NCE: normalized cross entropy: at most 1, 0 for confidences that all equal the share of
            right words, negative for less informative ones; None like AUC.
        ECE: expected calibration error, the mean distance of confidence and share of right words.

    >>> print(measure_calibration([0.9, 0.8, 0.2], [True, True, False]))
    AUC 1.0, NCE 0.7, ECE 0.17 (2 right / 3 words)
    """

    AUC: float | None
    NCE: float | None
    ECE: float
    words: int
    right: int

    def __str__(self) -> str:
        digits = 2 if self.words >= MIN_WORDS_FOR_TWO_DIGITS else 1
        figures = (("AUC", self.AUC, digits), ("NCE", self.NCE, digits), ("ECE", self.ECE, 2))
        text = ", ".join(f"{name} {value:.{n}f}" for name, value, n in figures if value is not None)
        return f"{text} ({self.right} right / {self.words} words)"


def measure_calibration(confidences: Sequence[float], right: Sequence[bool]) -> Calibration | None:
    """Compare confidences, between 0 and 1 exclusive, with the truth of each word: (N,), (N,).

    Returns None if there are no words. Source of the ECE: Naeini, Cooper and Hauskrecht (2015,
    "Obtaining well calibrated probabilities using Bayesian binning").
    """
    values, is_right = np.array(confidences, np.float64), np.array(right, np.bool_)
    if not len(values):
        return None
    has_both = is_right.any() and not is_right.all()
    bins = reliability_bins(confidences, right)
    return Calibration(
        AUC=_auc(values, is_right) if has_both else None,
        NCE=_nce(values, is_right) if has_both else None,
        ECE=sum(b.words * abs(b.confidence - b.right) for b in bins) / len(values),
        words=len(is_right),
        right=int(is_right.sum()),
    )


def reliability_bins(confidences: Sequence[float], right: Sequence[bool]) -> tuple[Bin, ...]:
    """Sort words into tenths of the confidence scale; return the bins with words: (N,), (N,)."""
    values, is_right = np.array(confidences, np.float64), np.array(right, np.bool_)
    tenths = np.minimum((values * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    return tuple(
        Bin(int(inside.sum()), float(values[inside].mean()), float(is_right[inside].mean()))
        for inside in (tenths == tenth for tenth in np.unique(tenths))
    )


def _auc(values: Float64s, right: Bools) -> float:
    """Compare every right word with every wrong one; equal confidences count half."""
    wrong = np.sort(values[~right])
    below = np.searchsorted(wrong, values[right], "left")
    not_above = np.searchsorted(wrong, values[right], "right")
    return float((below + not_above).mean() / (2 * len(wrong)))


def _nce(values: Float64s, right: Bools) -> float:
    """Compute the normalized cross entropy as NIST's sclite does.

    (H + sum of log2 p of the right words + sum of log2 (1 - p) of the wrong ones) / H, where H is
    the entropy of the share of right words (documentation of sclite in NIST SCTK; Siu, Gish and
    Richardson, 1997, "Improved estimation, evaluation and applications of confidence measures for
    speech recognition").
    """
    share = right.mean()
    entropy = -(right.sum() * np.log2(share) + (~right).sum() * np.log2(1 - share))
    evidence = np.log2(values[right]).sum() + np.log2(1 - values[~right]).sum()
    return float((entropy + evidence) / entropy)
