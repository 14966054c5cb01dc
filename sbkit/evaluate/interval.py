"""A 95 % interval of an error rate, from a bootstrap over speakers or clips.

Clips of one speaker fail together, so speakers are drawn where they are known: a resample is as
many units as there are, with replacement, and its rate is all its errors divided by all its words.
The ends are the 2.5 % and 97.5 % percentiles (Bisani & Ney, ICASSP 2004).

An interval over clips says nothing about speakers who are not in the test, and one of few units is
too narrow: in 1,000 simulations of speakers with rates of their own, intervals of 2, 5, 10, 20 and
60 speakers held the true rate in 51, 84, 90, 93 and 94 %.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.evaluate.wer import ErrorCounts

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
