"""Intervals of error rates, and of the difference between the rates of two recognizers.

The 95 % interval of a rate is from a bootstrap over speakers, because clips of one speaker fail
together, or over clips if the speakers are unknown (Bisani & Ney, ICASSP 2004). An interval over
clips says nothing about speakers who are not in the test, and an interval over few units is too
narrow: in 1,000 simulations of speakers with individual rates, intervals over 2, 5, 10, 20 and 60
speakers contained the true rate in 51, 84, 90, 93 and 94 %.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Array, Counts, Float64s
from sbkit.evaluate.wer import ErrorCounts, FigureDict

NUM_DRAWS = 10_000
UNITS_AT_ONCE = 1 << 17  # drawn together: 1 MB stays in a core's cache
MAX_CACHED_UNITS = 1 << 20  # cached draws take 8 MB; draws of 20,000 clips would take 1.6 GB
MIN_UNITS = 10  # an interval over fewer contains the true rate in less than 90 %
CountsByRate = Mapping[str, Sequence[ErrorCounts]]  # of each utterance, by the name of the rate


class Grouping(NamedTuple):
    """The units that the bootstrap draws.

    unit: as in `Interval`.
    groups: the name of each utterance's unit.
    """

    unit: str
    groups: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A 95 % interval, in fractions; both ends are None for fewer than two units or no words.

    unit: "speaker", "clip" or "speaker or clip"; unit_count: the number of units.

    >>> counts = [ErrorCounts(substitutions=n % 3, reference_length=9) for n in range(40)]
    >>> clips = group_by_speaker([str(n) for n in range(40)], [""] * 40)
    >>> print(intervals_of({"WER": counts}, clips)["WER"])
    8.1 to 13.6, 40 clips
    """

    low: float | None
    high: float | None
    unit: str
    unit_count: int

    def __str__(self) -> str:
        ends = self.format_ends()
        return ends if self.low is None else f"{ends}, {self.describe_units()}"

    def format_ends(self) -> str:
        if self.low is None or self.high is None:
            return f"no interval over {self._count_units()}"
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}"

    def describe_units(self) -> str:
        """Format the number of units, with "only" if they are too few for a reliable interval."""
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


def intervals_of(
    counts: CountsByRate, grouping: Grouping, *, minus: CountsByRate | None = None
) -> dict[str, Interval]:
    """Compute the interval of each rate from its counts of each utterance.

    With ``minus``, the counts of another system on the same references, compute the interval of the
    difference of both rates. Both rates of a draw are from the same units, so the units' difficulty
    cancels out.
    """
    if not counts:
        return {}
    errors = np.array([[c.errors for c in series] for series in counts.values()], np.int64)
    if minus is not None:
        errors -= [[c.errors for c in minus[rate]] for rate in counts]
    lengths = [[c.reference_length for c in series] for series in counts.values()]
    intervals = rate_intervals(errors, np.array(lengths, np.int64), grouping)
    return dict(zip(counts, intervals, strict=True))


def plain_intervals(intervals: Mapping[str, Interval]) -> FigureDict:
    """Return the interval of each rate as plain data, under `NAME_interval`."""
    return {f"{name}_interval": asdict(interval) for name, interval in intervals.items()}


def rate_intervals(
    errors: Counts, totals: Counts, grouping: Grouping, *, draws: int = NUM_DRAWS, seed: int = 0
) -> list[Interval]:
    """Compute the intervals of R rates of N utterances: the sums over (R, N), (R, N), divided.

    The same input in any order gives the same intervals.
    """
    units = {name: index for index, name in enumerate(sorted({*grouping.groups}))}
    unit_of = np.array([units[group] for group in grouping.groups], dtype=np.int64)
    unit_counts = np.zeros((len(units), 2 * len(errors)))  # whole numbers, so sums are exact
    np.add.at(unit_counts, unit_of, np.concatenate([errors, totals]).T)
    ends: Array = np.full((2, len(errors)), None)
    if len(units) > 1:
        resample = _cached_resamples if draws * len(units) <= MAX_CACHED_UNITS else _resamples
        sums = np.concatenate(
            [unit_weights @ unit_counts for unit_weights in resample(len(units), draws, seed)]
        )
        drawn_totals = np.maximum(sums[:, len(errors) :], 1)  # references may be empty
        rates = sums[:, : len(errors)] / drawn_totals
        has_total = totals.any(axis=1)
        ends[:, has_total] = np.quantile(rates[:, has_total], (0.025, 0.975), axis=0)
    return [
        Interval(low=low, high=high, unit=grouping.unit, unit_count=len(units))
        for low, high in ends.T.tolist()
    ]


def _resamples(num_units: int, draws: int, seed: int) -> Iterator[Float64s]:
    """Yield the counts of the units in each draw, in blocks of (D, num_units)."""
    random = np.random.default_rng(seed)
    draws_at_once = max(1, UNITS_AT_ONCE // num_units)
    for first in range(0, draws, draws_at_once):
        rows = np.arange(min(draws_at_once, draws - first))[:, None]
        drawn_units = random.integers(num_units, size=(len(rows), num_units))
        counts = np.bincount((rows * num_units + drawn_units).ravel(), minlength=drawn_units.size)
        yield counts.reshape(drawn_units.shape).astype(np.float64)


@lru_cache(maxsize=1)
def _cached_resamples(num_units: int, draws: int, seed: int) -> list[Float64s]:
    """Keep the draws for the next slice, which often has as many units."""
    return [*_resamples(num_units, draws, seed)]
