"""The splits of a run by name, and the utterances that it does without."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import datasets
import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.data.corpora.columns import sample_counts, take_columns


@dataclass(frozen=True)
class Excluded:
    """One utterance that a run does without, and why."""

    split: str
    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Splits:
    """The data of a run: one training set, and validation and test sets by their names.

    excluded: what could not be used; out_of_range: what `min_seconds` and `max_seconds` keep out of
    train, and unused: their rows; fingerprints: a hash of what each split holds.
    """

    train: datasets.Dataset
    valid: Mapping[str, datasets.Dataset]
    test: Mapping[str, datasets.Dataset]
    excluded: list[Excluded] = field(default_factory=list)
    out_of_range: list[Excluded] = field(default_factory=list)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    unused: datasets.Dataset | None = None

    def named(self) -> dict[str, datasets.Dataset]:
        """Return every split by its name; the training set is `train`."""
        return {"train": self.train, **self.valid, **self.test}

    def evaluated(self) -> dict[str, datasets.Dataset]:
        """Return the validation and test sets by their names."""
        return {**self.valid, **self.test}


@dataclass(frozen=True)
class Limited:
    """Utterances of a length to train on, the others, and the list of those."""

    kept: datasets.Dataset
    outside: datasets.Dataset
    excluded: list[Excluded]


def within_limits(
    train: datasets.Dataset, *, min_seconds: float, max_seconds: float, sample_rate: int
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


def write_excluded(file: Path, excluded: Iterable[Excluded]) -> None:
    """Write a TSV, one utterance a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [tuple(field.name for field in fields(Excluded)), *map(astuple, excluded)]
    lines = ("\t".join(" ".join(value.split()) for value in row) for row in rows)
    write_text_atomically(file, "\n".join(lines) + "\n")
