"""Which utterances are of a length to train on; looks at no audio."""

from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.data.columns import sample_counts, take_columns
from sbkit.data.splits import Excluded


@dataclass(frozen=True)
class Limited:
    """Utterances of a length to train on, the others, and the list of those."""

    kept: Dataset
    outside: Dataset
    excluded: list[Excluded]


def within_limits(
    train: Dataset, *, min_seconds: float, max_seconds: float, sample_rate: int
) -> Limited:
    """Keep the utterances from ``min_seconds`` to ``max_seconds``, and list the others.

    Raises:
        SbkitError: none is left.
    """
    samples = sample_counts(train)
    too_short = samples < seconds_to_samples(min_seconds, sample_rate)
    too_long = samples > seconds_to_samples(max_seconds, sample_rate)
    ids = take_columns(train, "id")["id"]
    out_of_range = [
        Excluded("train", ids[int(row)].as_py(), reason, f"{seconds:.2f} s")
        for rows, reason in (
            (too_short, f"shorter than {min_seconds:g} s"),
            (too_long, f"longer than {max_seconds:g} s"),
        )
        for row in np.flatnonzero(rows)
        for seconds in [samples_to_seconds(int(samples[row]), sample_rate)]
    ]
    kept = np.flatnonzero(~(too_short | too_long))
    if len(train) and not len(kept):
        raise SbkitError(
            f"`min_seconds` and `max_seconds` must leave something to train on, but none of the "
            f"{len(train)} utterances is between {min_seconds:g} and {max_seconds:g} s long. "
            "Widen them."
        )
    outside = np.flatnonzero(too_short | too_long)
    return Limited(train.select(kept), train.select(outside), out_of_range)
