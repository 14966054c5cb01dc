"""The intervals of a test set's figures, for its entry in ``summary.json`` and for the screen."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sbkit.evaluate.interval import Counts, Interval, Units, rate_interval, units_of
from sbkit.evaluate.wer import ErrorCounts, Scored

FEW = 10  # units; fewer hold the true rate in less than 90 % (`sbkit/evaluate/interval.py`)


@dataclass(frozen=True, kw_only=True)
class RateIntervals:
    """The intervals of the word and of the character error rate."""

    wer: Interval
    cer: Interval


def rate_intervals(scored: Sequence[Scored]) -> RateIntervals:
    """Compute both over the speakers of the utterances where they are known, else the clips."""
    units = units_of([each.id for each in scored], [each.speaker for each in scored])
    return RateIntervals(
        wer=interval_of([each.scores.words for each in scored], units),
        cer=interval_of([each.scores.characters for each in scored], units),
    )


def interval_of(counts: Sequence[ErrorCounts], units: Units) -> Interval:
    """Compute the interval of a rate from the counts of each utterance."""
    return rate_interval(errors_of(counts), totals_of(counts), units)


def errors_of(counts: Sequence[ErrorCounts]) -> Counts:
    """Return the errors of each utterance, (N,)."""
    return np.array([each.errors for each in counts], dtype=np.int64)


def totals_of(counts: Sequence[ErrorCounts]) -> Counts:
    """Return the words or characters of each reference, (N,)."""
    return np.array([each.total for each in counts], dtype=np.int64)


def interval_figures(interval: Interval) -> dict[str, Any]:
    """Return an interval as plain data; without one its ends are null and there is a reason."""
    return {name: value for name, value in asdict(interval).items() if value != ""}


def describe_interval(interval: Interval) -> str:
    """Write an interval in percent, and what was drawn: "31.4 to 50.2, 65 clips"."""
    if interval.low is None or interval.high is None:
        return f"no interval: {interval.reason}"
    ends = f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"
    return f"{ends}, {describe_units(interval.unit, interval.unit_count)}"


def describe_units(unit: str, count: int) -> str:
    """Write how many units were drawn, "only" where an interval over so few is too narrow."""
    plural = " or ".join(f"{each}s" for each in unit.split(" or "))
    return f"{'only ' if count < FEW else ''}{count} {plural}"
