"""A 95 % interval of an error rate, from a bootstrap over speakers or clips.

Clips of one speaker fail together, so speakers are drawn where they are known: a resample is as
many units as there are, with replacement, and its rate is all its errors divided by all its words.
The ends are the 2.5 % and 97.5 % percentiles (Bisani & Ney, ICASSP 2004).

An interval over clips says nothing about speakers who are not in the test, and one of few units is
too narrow: in 1,000 simulations of speakers with rates of their own, intervals of 2, 5, 10, 20 and
60 speakers held the true rate in 51, 84, 90, 93 and 94 %.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.evaluate.wer import ErrorCounts

DRAWS = 10_000
CHUNK = 1 << 20  # units drawn at a time, 8 MB; all draws of 20,000 clips would be 1.6 GB
FEW = 10  # units; an interval over fewer holds the true rate in less than 90 %

Counts = npt.NDArray[np.int64]  # one for each utterance, or for each unit
Rates = npt.NDArray[np.float64]  # one for each draw


@dataclass(frozen=True, kw_only=True)
class Units:
    """What is drawn: the unit of each utterance, and what the units are, in the singular."""

    name: str
    groups: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A 95 % interval, in fractions; without one both ends are None and ``reason`` says why.

    ``unit`` is what was drawn, in the singular; ``unit_count`` how many of them there are.
    """

    low: float | None
    high: float | None
    unit: str
    unit_count: int
    reason: str = ""

    def __str__(self) -> str:
        """Write it in percent, and what was drawn: "31.4 to 50.2, 65 clips"."""
        if self.low is None or self.high is None:
            return f"no interval: {self.reason}"
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}, {self.describe_units()}"

    def describe_units(self) -> str:
        """Write how many units were drawn, "only" where an interval over so few is too narrow."""
        plural = " or ".join(f"{each}s" for each in self.unit.split(" or "))
        return f"{'only ' if self.unit_count < FEW else ''}{self.unit_count} {plural}"

    def plain(self) -> dict[str, Any]:
        """Return it as plain data; without one its ends are null and there is a reason."""
        return {name: value for name, value in asdict(self).items() if value != ""}


def interval_of(counts: Sequence[ErrorCounts], units: Units) -> Interval:
    """Compute the interval of a rate from the counts of each utterance."""
    return rate_interval(errors_of(counts), totals_of(counts), units)


def errors_of(counts: Sequence[ErrorCounts]) -> Counts:
    """Return the errors of each utterance, (N,)."""
    return np.array([each.errors for each in counts], dtype=np.int64)


def totals_of(counts: Sequence[ErrorCounts]) -> Counts:
    """Return the words or characters of each reference, (N,)."""
    return np.array([each.total for each in counts], dtype=np.int64)


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
        return Units(name="clip", groups=clips)
    return Units(name="speaker" if all(speakers) else "speaker or clip", groups=groups)


def rate_interval(
    errors: Counts, totals: Counts, units: Units, *, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Compute the interval of the rate ``errors.sum() / totals.sum()``: (N,), (N,), N units.

    Given differences in errors, A - B, over the same references, this is the interval of the
    difference of two rates: both rates of a draw are of the same units, so that what is hard for
    both cancels out. The same input gives the same interval, also in another order.
    """
    errors, totals = _by_unit((errors, totals), units.groups)
    unit, count = units.name, len(totals)
    if reason := _why_none(totals, unit):
        return Interval(low=None, high=None, unit=unit, unit_count=count, reason=reason)
    rates = np.concatenate([*_resampled(errors, totals, draws, seed)])
    low, high = np.quantile(rates, (0.025, 0.975)).tolist()
    return Interval(low=low, high=high, unit=unit, unit_count=count)


def _by_unit(counts: tuple[Counts, Counts], groups: Sequence[str]) -> tuple[Counts, Counts]:
    """Add the counts of each unit; units are in the order of their names."""
    names, unit_of = np.unique(np.array(groups, dtype=np.str_), return_inverse=True)
    added = np.zeros((2, len(names)), dtype=np.int64)
    for row, each in zip(added, counts, strict=True):
        np.add.at(row, unit_of, each)
    return added[0], added[1]


def _why_none(totals: Counts, unit: str) -> str:
    if len(totals) < 2:
        return f"there must be at least two to draw from, but there is {len(totals)} {unit}"
    return "" if totals.any() else "the references are empty"


def _resampled(errors: Counts, totals: Counts, draws: int, seed: int) -> Iterator[Rates]:
    """Yield the rates of all draws, some at a time; a draw of empty references divides by one."""
    random, units = np.random.default_rng(seed), len(totals)
    step = max(1, CHUNK // units)
    for first in range(0, draws, step):
        drawn = random.integers(units, size=(min(step, draws - first), units))
        yield errors.take(drawn).sum(1) / np.maximum(totals.take(drawn).sum(1), 1)
