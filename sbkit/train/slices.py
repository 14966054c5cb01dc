"""The metrics of a test set for each value of a column: by speaker, language, gender, length.

The YAML names the columns in `report_by`; any recipe that measures its results has such a report.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.base.units import samples_to_seconds
from sbkit.data.batch import OWN
from sbkit.data.splits import Splits

Measure = Callable[[Sequence[Any]], Mapping[str, Any]]
Slices = dict[str, dict[str, dict[str, Any]]]  # column -> value -> utterances and metrics
LENGTH = "length"  # a column that all data has
GROUPS = (0, 2, 5, 10, 20)  # seconds, at which groups of lengths begin
EMPTY = "(empty)"  # in the place of a value that the manifest does not give


def require_columns(report_by: Any, splits: Splits) -> None:
    """Check that every test set has the columns that are reported by.

    Raises SbkitError: `report_by` is no list of names, or a test set has no such column.
    """
    if not isinstance(report_by, list) or not all(isinstance(each, str) for each in report_by):
        raise SbkitError(
            f"`report_by` must be a list of columns, but is {report_by!r}. Write [gender], or [] "
            "for none."
        )
    for name, split in splits.test.items():
        columns = [each for each in split.column_names if each not in (*OWN, LENGTH)] + [LENGTH]
        for column in report_by:
            if column not in columns:
                raise SbkitError(
                    f"`report_by` must name columns of the test sets, but {name} has no "
                    f"`{column}`. It has {', '.join(columns)}."
                )


def slice_columns(
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    samples: Sequence[int],
    sample_rate: int,
) -> list[tuple[str, ...]]:
    """Return what the columns say of each utterance, and `length` by its samples.

    A column of the data that is named so goes before.
    """
    lengths = [_group_length(samples_to_seconds(each, sample_rate)) for each in samples]
    found = {LENGTH: lengths, **columns}
    return list(zip(*(found[name] for name in names), strict=True))


def _group_length(seconds: float) -> str:
    """Name the lengths between which an utterance is; sorted, the names are in their order."""
    place = bisect_right(GROUPS, seconds) - 1
    if place == len(GROUPS) - 1:
        return f"{GROUPS[place]} s or more"
    return f"{GROUPS[place]:02d} to {GROUPS[place + 1]:02d} s"


def measure_slices(
    names: Sequence[str], columns: Sequence[Sequence[str]], results: Sequence[Any], measure: Measure
) -> Slices:
    """Measure the results of each value of each column; ``columns`` are those of each result."""
    slices: Slices = {}
    for number, name in enumerate(names):
        by_value: dict[str, list[Any]] = defaultdict(list)
        for values, result in zip(columns, results, strict=True):
            by_value[values[number] or EMPTY].append(result)
        slices[name] = {
            value: {"utterances": len(each), **measure(each)}
            for value, each in sorted(by_value.items())
        }
    return slices


def _flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ends of each interval as figures of their own."""
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            stem = name.removesuffix("_interval")
            flat |= {f"{stem}_low": value["low"], f"{stem}_high": value["high"]}
        else:
            flat[name] = value
    return flat


def write_slices(file: Path, slices: Slices) -> None:
    """Write a TSV: a line for each value of each column."""
    rows = [
        {"column": column, "value": value, **_flat(figures)}
        for column, values in slices.items()
        for value, figures in values.items()
    ]
    lines = [list(rows[0])] if rows else []
    lines += [[" ".join(str(each).split()) for each in row.values()] for row in rows]
    write_text_atomically(file, "".join("\t".join(line) + "\n" for line in lines))
