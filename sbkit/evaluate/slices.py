"""The metrics of a test set for each value of a column: by speaker, language, gender, length.

The YAML names the columns in `report_by`; any recipe that measures its results has such a report.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbkit.audio.io import Samples
from sbkit.audio.levels import estimate_snr
from sbkit.base.errors import SbkitError
from sbkit.base.files import write_text_atomically
from sbkit.base.messages import printable
from sbkit.base.units import samples_to_seconds

Measure = Callable[[Sequence[Any]], Mapping[str, Any]]
Slices = dict[str, dict[str, dict[str, Any]]]  # column -> value -> utterances and metrics
LENGTH, NOISE = "length", "noise"  # columns that all data has
LENGTHS = (0, 2, 5, 10, 20)  # seconds, at which groups begin
RATIOS = (0, 10, 20, 30, 40, 50)  # dB of speech above noise (`sbkit/audio/levels.py`)
EMPTY = "(empty)"  # in the place of a value that the manifest does not give


def require_columns(report_by: Any, tests: Mapping[str, Sequence[str]]) -> None:
    """Check that the columns of every test set, ``tests``, have those of `report_by`.

    Raises SbkitError: `report_by` is no list of names, or a test set has no such column.
    """
    if not isinstance(report_by, list) or not all(isinstance(each, str) for each in report_by):
        raise SbkitError(
            f"`report_by` must be a list of columns, but is {report_by!r}. Write [gender], or [] "
            "for none."
        )
    for name, known in tests.items():
        columns = [*dict.fromkeys([*known, LENGTH, NOISE])]
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
    clips: Iterable[Samples] = (),
) -> list[tuple[str, ...]]:
    """Return what the columns say of each utterance, `length` by its samples, `noise` by its clip.

    A column of the data that is named so goes before; ``clips`` are read for `noise` alone.
    """
    seconds = [samples_to_seconds(each, sample_rate) for each in samples]
    found = {LENGTH: [_group(each, LENGTHS, "s") for each in seconds], **columns}
    if NOISE in names and NOISE not in found:
        found[NOISE] = [_group(estimate_snr(each, sample_rate), RATIOS, "dB") for each in clips]
    return list(zip(*(found[name] for name in names), strict=True))


def _group(value: float | None, groups: Sequence[int], unit: str) -> str:
    """Name the numbers between which a value is; sorted, the names are in their order."""
    if value is None:
        return ""
    place = bisect_right(groups, value) - 1
    if place == len(groups) - 1:
        return f"{groups[place]} {unit} or more"
    return f"{groups[place]:02d} to {groups[place + 1]:02d} {unit}"


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


def _cell(value: object) -> str:
    """Write a cell that clears no screen and that no spreadsheet computes; "" for None."""
    if not isinstance(value, str):
        return "" if value is None else str(value)
    text = printable(" ".join(value.split()))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def write_slices(file: Path, slices: Slices) -> None:
    """Write a TSV: a line for each value of each column."""
    rows = [
        {"column": column, "value": value, **_flat(figures)}
        for column, values in slices.items()
        for value, figures in values.items()
    ]
    lines = [list(rows[0])] if rows else []
    lines += [[*map(_cell, row.values())] for row in rows]
    write_text_atomically(file, "".join("\t".join(line) + "\n" for line in lines))
