"""The splits of a run by name, and the utterances that it does without."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import datasets

from sbkit.base.files import write_text_atomically


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


def report_excluded(excluded: Iterable[Excluded], file: Path) -> dict[tuple[str, str], int]:
    """Write what is left out as a TSV, and count it by split and reason."""
    excluded = list(excluded)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_excluded(file, excluded)
    return dict(Counter((item.split, item.reason) for item in excluded))


def write_excluded(file: Path, excluded: Iterable[Excluded]) -> None:
    """Write a TSV, one utterance a line."""
    rows = [tuple(field.name for field in fields(Excluded)), *map(astuple, excluded)]
    lines = ("\t".join(" ".join(value.split()) for value in row) for row in rows)
    write_text_atomically(file, "\n".join(lines) + "\n")
