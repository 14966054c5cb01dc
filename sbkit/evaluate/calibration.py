"""The quality of confidences: do they separate right from wrong words, and are they probabilities?

Legend: N words, of which some are right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BINS = 10  # of confidences, of equal width
MANY = 10_000  # words: of 394, the AUC's 95 % interval is 0.86 to 0.94, one digit

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Bin(NamedTuple):
    """Words of similar confidence: how many, their mean confidence, and the share of right ones."""

    words: int
    confidence: float
    right: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How good the confidences of some words are.

    AUC: the probability that a right word has a higher confidence than a wrong one, 0.5 by chance.
    NCE: normalized cross entropy, 1 at best, 0 for confidences that all equal the share of right
    words, negative for less informative ones.
    ECE: expected calibration error, the mean distance between confidence and share of right words.
    words, right: how many. AUC and NCE are None where all words are right or all are wrong.
    """

    AUC: float | None
    NCE: float | None
    ECE: float
    words: int
    right: int

    def __str__(self) -> str:
        """Write the figures in one line."""
        digits = 2 if self.words >= MANY else 1
        figures = (("AUC", self.AUC, digits), ("NCE", self.NCE, digits), ("ECE", self.ECE, 2))
        text = ", ".join(f"{name} {of:.{n}f}" for name, of, n in figures if of is not None)
        return f"{text} ({self.right} right / {self.words} words)"


def measure_calibration(confidences: Sequence[float], right: Sequence[bool]) -> Calibration | None:
    """Compare confidences, above 0 and below 1, with whether the words are right: (N,), (N,).

    None where there are no words. Source of the ECE: Naeini, Cooper and Hauskrecht (2015,
    "Obtaining well calibrated probabilities using Bayesian binning").
    """
    given, truth = np.array(confidences, np.float64), np.array(right, np.bool_)
    if not len(given):
        return None
    mixed = 0 < truth.sum() < len(truth)
    bins = reliability_bins(confidences, right)
    return Calibration(
        AUC=_auc(given, truth) if mixed else None,
        NCE=_nce(given, truth) if mixed else None,
        ECE=sum(each.words * abs(each.confidence - each.right) for each in bins) / len(given),
        words=len(truth),
        right=int(truth.sum()),
    )


def reliability_bins(confidences: Sequence[float], right: Sequence[bool]) -> tuple[Bin, ...]:
    """Sort words by tenths of their confidence; bins without words are left out: (N,), (N,)."""
    given, truth = np.array(confidences, np.float64), np.array(right, np.bool_)
    tenths = np.minimum((given * BINS).astype(np.int64), BINS - 1)
    return tuple(
        Bin(int(inside.sum()), float(given[inside].mean()), float(truth[inside].mean()))
        for inside in (tenths == each for each in np.unique(tenths))
    )


def _auc(given: Floats, right: Bools) -> float:
    """Compare every right word with every wrong one; equal confidences count a half."""
    wrong = np.sort(given[~right])
    below = np.searchsorted(wrong, given[right], "left")
    not_above = np.searchsorted(wrong, given[right], "right")
    return float((below + not_above).mean() / (2 * len(wrong)))


def _nce(given: Floats, right: Bools) -> float:
    """Compute the normalized cross entropy as NIST's sclite does.

    (H + sum of log2 p of the right words + sum of log2 (1 - p) of the wrong ones) / H, where H is
    the entropy of the share of right words (NIST SCTK, documentation of sclite;
    Siu, Gish and Richardson, 1997, "Improved estimation, evaluation and applications of confidence
    measures for speech recognition").
    """
    share = right.mean()
    entropy = -(right.sum() * np.log2(share) + (~right).sum() * np.log2(1 - share))
    evidence = np.log2(given[right]).sum() + np.log2(1 - given[~right]).sum()
    return float((entropy + evidence) / entropy)
