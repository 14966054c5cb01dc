"""The splits of a run: by role and by name, and the utterances that it does without."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path

import datasets
import numpy as np

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.base.units import samples_to_seconds, seconds_to_samples
from sbkit.data.storage.columns import sample_counts, take_columns

ROLES = ("train", "valid", "test")
SPLIT_NAME = re.compile(r"[^\W_][\w.+-]*")  # names files, too


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

    def with_named(self, named: Mapping[str, datasets.Dataset]) -> "Splits":
        """Return splits of the same names and roles that hold other data."""
        return replace(
            self,
            train=named["train"],
            valid={name: named[name] for name in self.valid},
            test={name: named[name] for name in self.test},
        )

    def evaluated(self) -> dict[str, datasets.Dataset]:
        """Return the validation and test sets by their names."""
        return {**self.valid, **self.test}


def within_limits(
    train: datasets.Dataset, *, min_seconds: float, max_seconds: float, sample_rate: int
) -> tuple[datasets.Dataset, datasets.Dataset, list[Excluded]]:
    """Return the utterances from ``min_seconds`` to ``max_seconds``, the others, and their list.

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
    return train.select(kept), train.select(outside), out_of_range


def write_excluded(file: Path, excluded: Iterable[Excluded]) -> None:
    """Write a TSV, one utterance a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [tuple(field.name for field in fields(Excluded)), *map(astuple, excluded)]
    lines = ("\t".join(" ".join(value.split()) for value in row) for row in rows)
    write_text_atomically(file, "\n".join(lines) + "\n")


def resolve_splits(
    wanted: object, default: Mapping[str, Sequence[str]], available: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the splits of each role: those of the knob ``splits``, else the corpus's own.

    Args:
        wanted: null, or a mapping from ``train``, ``valid``, ``test`` to a name or a list of names.
        default: the corpus's own splits of each role.
        available: the names of all splits that the corpus has.

    Raises:
        SbkitError: an unknown role or split, a split with two roles, nothing to train or validate,
            or a split called ``train`` that is not trained on.
    """
    named = {} if wanted is None else wanted
    if not isinstance(named, Mapping) or not {*named} <= {*ROLES}:
        raise SbkitError(
            f"`splits` must map {', '.join(ROLES)} to names of splits, but is {wanted!r}. Write "
            "splits: {train: train, valid: dev, test: [test-clean, test-other]}, or null."
        )
    roles = dict[str, tuple[str, ...]]()
    for role in ROLES:
        names = named.get(role)
        names = default.get(role, ()) if names is None else names
        roles[role] = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
        _check_role(role, roles[role], available)
    for one, other in combinations(ROLES, 2):
        for name in {*roles[one]} & {*roles[other]}:
            raise SbkitError(
                f"A split must have one role, but {name!r} is in `splits.{one}` and in "
                f"`splits.{other}`. Take it out of one of them."
            )
    return roles


def _check_role(role: str, splits: Sequence[str], available: Sequence[str]) -> None:
    there = ", ".join(available) or "none"
    for name in splits:
        if name not in available:
            raise SbkitError(
                f"`splits.{role}` must name splits of the corpus, but {name!r} is none of them. "
                f"Choose among: {there}{', or [] for none' * (role == 'test')}."
            )
    if not splits and role != "test":
        raise SbkitError(
            f"`splits.{role}` must name at least one split, but there is none. "
            f"Choose among: {there}."
        )
    if "train" in splits and role != "train":
        raise SbkitError(
            "A split called train must be trained on, since a run calls its training set so, "
            f"but is in `splits.{role}`. Rename it, or choose another split."
        )


def require_split_name(name: str) -> None:
    """Raise SbkitError for a name with other characters than letters, digits and ``. + - _``."""
    if not SPLIT_NAME.fullmatch(name):
        raise SbkitError(
            "The name of a split must be made of letters, digits and . + - _, and begin with one "
            f"of the first two, but is {name!r}. Rename it."
        )
