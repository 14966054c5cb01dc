"""More than two runs beside each other: a table of their error rates, with the best marked.

Each is compared with the best as `sbkit.evaluate.compare` compares two. Who tries many runs finds
one that is best by chance: p is that of one pair.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.evaluate.compare import UNITS, compare, describe_p
from sbkit.evaluate.interval import Interval
from sbkit.evaluate.utterances import list_test_sets, read_utterances, utterances_file
from sbkit.evaluate.wer import Scored, have_words

Row = tuple[str, ...]


def rank_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """Rank runs, or folders of scores, on every test set that all have; returns plain data.

    Raises:
        SbkitError: no test set is in all, or the references of one differ.
    """
    of_each = {str(folder): list_test_sets(folder) for folder in folders}
    every = list(dict.fromkeys(name for names in of_each.values() for name in names))
    common = [name for name in every if all(name in names for names in of_each.values())]
    if not common:
        have = "; ".join(
            f"{run} has {', '.join(names) or 'none'}" for run, names in of_each.items()
        )
        raise SbkitError(
            "Runs must have the utterances of the same test set to be compared, but none is in all "
            f"({have}). Score all on the same data: sbkit score RUN DATA --out DIR."
        )
    return {
        "runs": [*of_each],
        "not_in_all": [name for name in every if name not in common],
        "test": {
            name: _rank(
                name, {run: read_utterances(utterances_file(Path(run), name)) for run in of_each}
            )
            for name in common
        },
    }


def _rank(name: str, runs: Mapping[str, Sequence[Scored]]) -> dict[str, Any]:
    """Compare each run with the one that has the fewest errors."""
    by_words = all(map(have_words, runs.values()))
    scored = {
        run: [replace(each, by_words=by_words) for each in several] for run, several in runs.items()
    }
    errors = {run: sum(each.errors.errors for each in several) for run, several in scored.items()}
    best = min(errors, key=errors.__getitem__)
    rows = list[dict[str, Any]]()
    for run, several in scored.items():
        try:
            found = compare(name, several, scored[best])
        except SbkitError as error:
            raise SbkitError(f"{error} Here A is {run}, and B is {best}.") from error
        rates = {rate: found[rate] for rate in UNITS if rate in found}
        rows.append(
            {
                "run": run,
                "best": errors[run] == errors[best],
                **{rate: each["a"] for rate, each in rates.items()},
                "above_best": {
                    rate: {
                        "difference": each["difference"],
                        "interval": each["difference_interval"],
                    }
                    for rate, each in rates.items()
                },
                "MAPSSWE": found["MAPSSWE"],
            }
        )
    totals = {UNITS[rate]: found[rate]["total"] for rate in rates}
    return {"utterances": found["utterances"], **totals, "rows": rows}


def describe_ranking(ranked: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table for each test set."""
    if ranked["not_in_all"]:
        yield f"not compared, because not in all: {', '.join(ranked['not_in_all'])}"
    for name, figures in ranked["test"].items():
        rows = figures["rows"]
        rates = [rate for rate in UNITS if rate in rows[0]]
        drawn = Interval(**rows[0][rates[0]]["interval"]).describe_units()
        totals = ", ".join(f"{figures[UNITS[rate]]} {UNITS[rate]}" for rate in rates)
        yield f"{name}: {figures['utterances']} utterances, {totals}; 95 % intervals over {drawn}"
        head = (" ", *(f"{rate} %" for rate in rates), f"{rates[0]} above the best, MAPSSWE", "run")
        yield from _aligned([head, *(_cells(row, rates) for row in rows)])


def _cells(row: Mapping[str, Any], rates: Sequence[str]) -> Row:
    found = (f"{100 * row[rate]['rate']:5.1f} ({_ends(row[rate]['interval'])})" for rate in rates)
    above, p = row["above_best"][rates[0]], row["MAPSSWE"]["p"]
    test = "no test" if p is None else describe_p(p)
    further = f"{100 * above['difference']:+.1f} ({_ends(above['interval'])}), {test}"
    return "*" if row["best"] else " ", *found, "" if row["best"] else further, row["run"]


def _ends(interval: Mapping[str, Any]) -> str:
    """Write an interval without what was drawn, which is the same for all."""
    return str(Interval(**interval)).partition(",")[0]


def _aligned(rows: Sequence[Row]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()
