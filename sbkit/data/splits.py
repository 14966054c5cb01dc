"""The utterances of a run, and those that it does without."""

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import datasets

from sbkit.base.files import write_text_atomically

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Excluded:
    """One utterance that a run does without, and why."""

    split: str
    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Splits:
    """The stores of a run.

    left_out: what could not be used; outside: what the declared limits keep out of train.
    """

    train: datasets.Dataset
    dev: datasets.Dataset
    test: datasets.Dataset
    left_out: list[Excluded] = field(default_factory=list)
    outside: list[Excluded] = field(default_factory=list)


def report_left_out(left_out: Iterable[Excluded], file: Path) -> dict[tuple[str, str], int]:
    """List what is left out in a TSV, and count it by split and reason."""
    left_out = list(left_out)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_left_out(file, left_out)
    return dict(Counter((item.split, item.reason) for item in left_out))


def write_left_out(file: Path, left_out: Iterable[Excluded]) -> None:
    """Write a TSV, one utterance a line."""
    rows = [tuple(field.name for field in fields(Excluded)), *map(astuple, left_out)]
    lines = ("\t".join(" ".join(value.split()) for value in row) for row in rows)
    write_text_atomically(file, "\n".join(lines) + "\n")


def read_left_out(file: Path) -> list[Excluded]:
    """Read such a TSV."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [Excluded(*row) for row in rows[1:]]
