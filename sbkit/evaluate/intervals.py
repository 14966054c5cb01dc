"""Intervals of error rates, and of the difference between the rates of two recognizers.

The 95 % interval of a rate is from a bootstrap over speakers, because clips of one speaker fail
together, or over clips if the speakers are unknown. A resample draws as many units as there are,
with replacement, and its rate is all its errors divided by all its words. The ends are the 2.5 and
97.5 percentiles (Bisani & Ney, ICASSP 2004). An interval over clips says nothing about speakers
who are not in the test, and an interval over few units is too narrow: in 1,000 simulations of
speakers with individual rates, intervals over 2, 5, 10, 20 and 60 speakers contained the true rate
in 51, 84, 90, 93 and 94 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Counts, Float64s
from sbkit.evaluate.wer import ErrorCounts

NUM_DRAWS = 10_000
UNITS_AT_ONCE = 1 << 20  # drawn together, 8 MB; all draws of 20,000 clips would be 1.6 GB
MIN_UNITS = 10  # an interval over fewer contains the true rate in less than 90 %


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
        random = np.random.default_rng(seed)
        unit_errors, unit_totals = unit_counts.T.copy()
        step = max(1, UNITS_AT_ONCE // len(names))
        rates: list[Float64s] = []
        for first in range(0, draws, step):
            drawn = random.integers(len(names), size=(min(step, draws - first), len(names)))
            drawn_totals = np.maximum(unit_totals.take(drawn).sum(1), 1)  # references may be empty
            rates.append(unit_errors.take(drawn).sum(1) / drawn_totals)
        ends = np.quantile(np.concatenate(rates), (0.025, 0.975)).tolist()
    return Interval(low=ends[0], high=ends[1], unit=grouping.unit, unit_count=len(names))
