"""The metrics of a test set for each value of a column: by speaker, language, gender, length.

The key `report_by` of a YAML names the columns.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sbkit.base.errors import ConfigError, concerning
from sbkit.base.files import write_lines_atomically
from sbkit.base.messages import printable
from sbkit.evaluate.wer import FigureDict

UtteranceResult = TypeVar("UtteranceResult")  # of an utterance
Slices = dict[str, dict[str, FigureDict]]  # column -> value -> utterances and metrics
LENGTH = "length"  # a column that can be computed for any data
LENGTH_GROUPS = (0, 2, 5, 10, 20)  # lower limits in seconds
EMPTY_VALUE = "(empty)"  # stands for a value that the manifest lacks


@concerning("report_by")
def require_columns(report_by: Sequence[str], tests: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError if a test set lacks a column.

    tests: the columns of each test set, by its name.
    """
    for name, test_columns in tests.items():
        columns = [*dict.fromkeys([*test_columns, LENGTH])]
        for column in report_by:
            if column not in columns:
                raise ConfigError(
                    f"`report_by` names `{column}`, but {name} has no such column. It has "
                    f"{', '.join(columns)}."
                )


def length_group(seconds: float) -> str:
    """Name the group of a length; the names sort like the lengths."""
    index = bisect_right(LENGTH_GROUPS, seconds) - 1
    if index == len(LENGTH_GROUPS) - 1:
        return f"{LENGTH_GROUPS[index]} s or more"
    return f"{LENGTH_GROUPS[index]:02d} to {LENGTH_GROUPS[index + 1]:02d} s"


def measure_slices(
    columns: Mapping[str, Sequence[str]],
    results: Sequence[UtteranceResult],
    measure: Callable[[Sequence[UtteranceResult]], Mapping[str, object]],
) -> Slices:
    """Measure the results for each value of each column, which has a value for each result."""
    slices: Slices = {}
    for name, values in columns.items():
        by_value: dict[str, list[UtteranceResult]] = defaultdict(list)
        for value, result in zip(values, results, strict=True):
            by_value[value or EMPTY_VALUE].append(result)
        # Groups of equal size share the draws of their intervals.
        groups = sorted(by_value.items(), key=lambda group: len(group[1]))
        figures = {value: {"utterances": len(group), **measure(group)} for value, group in groups}
        slices[name] = {value: figures[value] for value in sorted(figures)}
    return slices


def write_slices(file: Path, slices: Slices) -> None:
    """Write a TSV: a line for each value of each column."""
    rows: list[FigureDict] = []
    for column, by_value in slices.items():
        for value, figures in by_value.items():
            rows.append({"column": column, "value": value})
            for name, figure in figures.items():
                if isinstance(figure, Mapping):
                    stem = name.removesuffix("_interval")
                    rows[-1] |= {f"{stem}_low": figure["low"], f"{stem}_high": figure["high"]}
                else:
                    rows[-1][name] = figure
    lines = [list(rows[0])] if rows else []
    lines += [[_format_cell(value) for value in row.values()] for row in rows]
    write_lines_atomically(file, map("\t".join, lines))


def _format_cell(value: object) -> str:
    """Format a cell that can neither clear a screen nor run as a formula; "" for None."""
    if not isinstance(value, str):
        return "" if value is None else str(value)
    text = printable(" ".join(value.split()))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
