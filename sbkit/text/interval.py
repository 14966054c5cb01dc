"""Intervals of error rates, by drawing speakers or clips again and again.

Bisani and Ney, "Bootstrap estimates for confidence intervals in ASR performance evaluation" (2004).
Clips of one speaker are alike, so that speakers are drawn where they are known: an interval over
clips would say nothing about other voices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRAWS = 2_000
SHARE = 0.95  # of the draws, whose rates lie in the interval
AT_ONCE = 4_000_000  # counts in memory
FEWEST = 2  # units; of one, nothing can be drawn

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """From where to where a rate lies in 95 of 100 test sets like this one.

    low, high: fractions; unit: what was drawn, speaker or clip; units: how many there are.
    """

    low: float
    high: float
    unit: str
    units: int

    def __str__(self) -> str:
        """Write it for the screen."""
        noun = f"{self.unit}{'s' * (self.units != 1)}"
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}, {self.units} {noun}"


def rate_interval(
    errors: Sequence[int], totals: Sequence[int], speakers: Sequence[str] | None = None
) -> Interval | None:
    """Return the interval of the rate sum(errors) / sum(totals), by utterance.

    Speakers are drawn where all are known and there are two or more, else clips. None where there
    are fewer than two units, or nothing was said. The same counts give the same interval.
    """
    known = speakers is not None and all(speakers) and len(set(speakers)) >= FEWEST
    counts = np.array([errors, totals], dtype=np.int64).reshape(2, -1)
    if known:
        _, group = np.unique(np.array(speakers), return_inverse=True)
        counts = np.stack([np.bincount(group, each) for each in counts]).astype(np.int64)
    units = counts.shape[1]
    if units < FEWEST or not counts[1].any():
        return None
    rates = _draw(counts[:, np.lexsort(counts)])  # whatever the order in which they came
    low, high = np.quantile(rates, [(1 - SHARE) / 2, (1 + SHARE) / 2]).tolist()
    return Interval(low, high, "speaker" if known else "clip", units)


def difference_interval(
    one: Sequence[int],
    other: Sequence[int],
    totals: Sequence[int],
    speakers: Sequence[str] | None = None,
) -> Interval | None:
    """Return the interval of the rate of `one` less that of `other`, on the same draws."""
    return rate_interval([a - b for a, b in zip(one, other, strict=True)], totals, speakers)


def _draw(counts: Counts) -> npt.NDArray[np.float64]:
    """Return the rate of each draw of as many units as there are: (2, N) -> (DRAWS,)."""
    random = np.random.default_rng(0)
    units = counts.shape[1]
    rates = []
    step = max(1, AT_ONCE // units)
    for start in range(0, DRAWS, step):
        chosen = random.integers(0, units, (min(step, DRAWS - start), units), dtype=np.int32)
        errors, totals = (each[chosen].sum(1) for each in counts)
        rates.append(errors / np.maximum(1, totals))
    return np.concatenate(rates)
