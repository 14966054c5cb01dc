"""Two runs beside each other: are their errors on the same test sets different?

RUN_A, RUN_B: run folders, or folders of `sbkit score --out` -> the utterances of the test sets of
both, with the same references -> rates, their difference, MAPSSWE, as plain data -> text or a page

More than two runs beside each other: a table of their error rates, with the best marked.

Each is compared with the best as `sbkit.evaluate.compare` compares two. Who tries many runs finds
one that is best by chance: p is that of one pair.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.evaluate.intervals import Interval, Units, interval_of, mapsswe, units_of
from sbkit.evaluate.report import REPORT, write_report
from sbkit.evaluate.run_results import read_clips, read_figures, read_results
from sbkit.evaluate.utterances import list_test_sets, read_utterances, utterances_file
from sbkit.evaluate.wer import ErrorCounts, ScoredUtterance, have_words

LEVEL = 0.05  # a difference with a smaller p is significant
MOST = 10  # utterances that are shown
UNITS = {"WER": "words", "CER": "characters"}


def compare_runs(a: Path, b: Path) -> dict[str, Any]:
    """Compare every test set that both have, and name the others; returns plain data.

    Raises:
        SbkitError: no test set is in both, or the references of one differ.
    """
    names_a, names_b = list_test_sets(a), list_test_sets(b)
    common = [name for name in names_a if name in names_b]
    if not common:
        raise SbkitError(
            f"Two runs must have the utterances of the same test set to be compared, but {a} has "
            f"{', '.join(names_a) or 'none'} and {b} has {', '.join(names_b) or 'none'}. Score "
            "both on the same data: sbkit score RUN DATA --out DIR."
        )
    return {
        "a": str(a),
        "b": str(b),
        "only_a": [name for name in names_a if name not in common],
        "only_b": [name for name in names_b if name not in common],
        "test": {
            name: compare(name, *(read_utterances(utterances_file(each, name)) for each in (a, b)))
            for name in common
        },
    }


def compare(
    name: str, a: Sequence[ScoredUtterance], b: Sequence[ScoredUtterance]
) -> dict[str, Any]:
    """Compare the results of two systems on the same ids and references, in any order.

    Returns WER and CER, or CER alone for a language that writes no spaces between words, in which
    all counts are of characters; MAPSSWE; and the utterances whose errors changed most, the largest
    change first.

    Raises:
        SbkitError: the references differ.
    """
    by_words = have_words([*a, *b])
    a, b = (
        sorted(
            (replace(each, by_words=by_words) for each in side),
            key=lambda each: (each.id, each.reference),
        )
        for side in (a, b)
    )
    if [(each.id, each.reference) for each in a] != [(each.id, each.reference) for each in b]:
        raise _other_references(name, a, b)
    pairs = list(zip(a, b, strict=True))
    units = units_of([each.id for each in a], [one.speaker or two.speaker for one, two in pairs])
    triples = [(one.reference, one.hypothesis, two.hypothesis) for one, two in pairs]
    by_change = sorted(pairs, key=lambda each: -abs(_change(*each)))
    return {
        "utterances": len(pairs),
        **{
            rate: _two_rates(
                [getattr(each.scores, unit) for each in a],
                [getattr(each.scores, unit) for each in b],
                units,
            )
            for rate, unit in UNITS.items()
            if by_words or rate == "CER"
        },
        "MAPSSWE": mapsswe(triples, by_words=by_words),
        "changed": [
            {
                "id": one.id,
                "reference": one.reference,
                "a": one.hypothesis,
                "b": two.hypothesis,
                f"{'word' if by_words else 'character'}_errors_a": one.errors.errors,
                f"{'word' if by_words else 'character'}_errors_b": two.errors.errors,
            }
            for one, two in by_change[:MOST]
            if _change(one, two)
        ],
    }


def _change(a: ScoredUtterance, b: ScoredUtterance) -> int:
    return a.errors.errors - b.errors.errors


def _two_rates(a: Sequence[ErrorCounts], b: Sequence[ErrorCounts], units: Units) -> dict[str, Any]:
    """Return an error rate of A and of B over the same references, and their difference A - B."""
    total_a, total_b = sum(a, ErrorCounts()), sum(b, ErrorCounts())
    sides = {
        side: {"rate": t.rate, "errors": t.errors, "interval": asdict(interval_of(counts, units))}
        for side, t, counts in (("a", total_a, a), ("b", total_b, b))
    }
    return {
        "total": total_a.total,
        **sides,
        "difference": total_a.rate - total_b.rate,
        "difference_interval": asdict(interval_of(a, units, minus=b)),
    }


def _other_references(
    name: str, a: Sequence[ScoredUtterance], b: Sequence[ScoredUtterance]
) -> SbkitError:
    texts_a, texts_b = ({each.id: each.reference for each in side} for side in (a, b))
    other = sorted(id for id in texts_a.keys() & texts_b if texts_a[id] != texts_b[id])
    example = (other or sorted(texts_a.keys() ^ texts_b.keys()) or [name])[0]
    return SbkitError(
        f"Two runs must have the same references to be compared, but those of {name} differ: "
        f"{len(texts_a.keys() - texts_b)} utterances are only in A, "
        f"{len(texts_b.keys() - texts_a)} only in B, and {len(other)} have another text, such as "
        f"{example}. Score both on the same data: sbkit score RUN DATA --out DIR."
    )


def describe_comparison(compared: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say how two runs differ."""
    for side in "ab":
        only = ", ".join(compared[f"only_{side}"])
        left = f" (not compared, because only here: {only})" if only else ""
        yield f"{side.upper()}: {compared[side]}{left}"
    for name, figures in compared["test"].items():
        yield from _describe_set(name, figures)


def _describe_set(name: str, figures: Mapping[str, Any]) -> Iterator[str]:
    rates = {rate: figures[rate] for rate in UNITS if rate in figures}
    totals = [f"{each['total']} {UNITS[rate]}" for rate, each in rates.items()]
    drawn = Interval(**figures["CER"]["difference_interval"]).describe_units()
    yield (
        f"{name}: {figures['utterances']} utterances, {', '.join(totals)}; "
        f"95 % intervals over {drawn}"
    )
    for rate, each in rates.items():
        for side in "ab":
            one = each[side]
            counts = f"{one['errors']} / {each['total']}; {Interval(**one['interval'])}"
            yield f"  {rate} {side.upper():<5} {100 * one['rate']:6.1f} % ({counts})"
        interval = Interval(**each["difference_interval"])
        yield f"  {rate} A - B {100 * each['difference']:+6.1f} points ({interval})"
    yield f"  MAPSSWE: {describe_test(figures)}"
    unit = _unit(figures)
    if figures["changed"]:
        yield f"  changed most, in {unit} errors:"
    for each in figures["changed"]:
        a, b = each[f"{unit}_errors_a"], each[f"{unit}_errors_b"]
        yield f"    {each['id']}: {a} in A, {b} in B"
        for label, key in (("reference", "reference"), ("A", "a"), ("B", "b")):
            yield f"      {label:<9}  {each[key]}".rstrip()


def _unit(figures: Mapping[str, Any]) -> str:
    return "word" if "WER" in figures else "character"


def describe_p(p: float) -> str:
    """Write how probable a difference is by chance."""
    return f"p {p:.3f}" if p >= 0.001 else "p < 0.001"


def describe_test(figures: Mapping[str, Any]) -> str:
    """Write the result of MAPSSWE, or why there is none."""
    test = figures["MAPSSWE"]
    if test["p"] is None:
        return f"no test: {test['reason']}"
    p, mean, z = describe_p(test["p"]), test["mean"], test["z"]
    found = f"{test['segments']} segments, A - B {mean:+.3f} errors each, Z {z:.3f}, {p}"
    if test["p"] >= LEVEL:
        return f"{found}: no significant difference"
    return f"{found}: {'B' if z > 0 else 'A'} makes fewer {_unit(figures)} errors"


def write_comparison(file: Path, compared: Mapping[str, Any]) -> None:
    """Write the page of both; it plays the clips that the report of one holds."""
    a, b = Path(compared["a"]), Path(compared["b"])
    clips = read_clips(a / REPORT) or read_clips(b / REPORT)
    write_report(
        file,
        [read_results(folder, read_figures(folder)) for folder in (a, b)],
        clips=lambda name, ids, most: {
            id: clips[name][id] for id in ids if id in clips.get(name, {})
        },
        compared=compared["test"],
        notes=[f"{name}: {describe_test(each)}" for name, each in compared["test"].items()],
    )


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


def _rank(name: str, runs: Mapping[str, Sequence[ScoredUtterance]]) -> dict[str, Any]:
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
