"""Compare runs: which makes the fewest errors, and does each of the others make more?

run folders, or folders of `sbkit score --out` -> the utterances of the test sets that all have
-> for each run its rates, how far they are above those of the best run, and MAPSSWE -> plain data
-> a table, and a page of two runs

p is that of one pair: among many runs, one is the best by chance.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from string import ascii_uppercase

from sbkit.base.errors import DataError
from sbkit.evaluate.intervals import Interval, Units, interval_of, mapsswe, units_of
from sbkit.evaluate.report import REPORT, write_report
from sbkit.evaluate.run_results import read_clips, read_figures, read_results
from sbkit.evaluate.wer import ErrorCounts, Figures, ScoredUtterance, have_words
from sbkit.evaluate.wer_report import list_test_sets, read_utterances, utterances_file

SIGNIFICANCE_LEVEL = 0.05  # a difference with a smaller p is significant
MAX_CHANGED = 10  # utterances that are listed
UNITS = {"WER": "words", "CER": "characters"}
LETTERS = [*ascii_uppercase, *map(str, range(27, 1000))]  # of the runs

Utterances = Sequence[ScoredUtterance]


def compare_runs(folders: Sequence[Path]) -> Figures:
    """Compare two or more runs on every test set that all have; return plain data.

    Raises DataError if no test set is in all runs, or the references of one differ.
    """
    sets_of_runs = [list_test_sets(folder) for folder in folders]
    names = list(dict.fromkeys(name for sets in sets_of_runs for name in sets))
    common = [name for name in names if all(name in sets for sets in sets_of_runs)]
    if not common:
        pairs = zip(folders, sets_of_runs, strict=True)
        available = "; ".join(f"{run} has {', '.join(sets) or 'none'}" for run, sets in pairs)
        raise DataError(
            f"Runs are compared on a test set that all have, but there is none ({available}). "
            "Score all on the same data: sbkit score RUN DATA --out DIR."
        )
    return {
        "runs": [str(folder) for folder in folders],
        "not_in_all": [name for name in names if name not in common],
        "test": {
            name: compare(
                name,
                [
                    (str(folder), read_utterances(utterances_file(folder, name)))
                    for folder in folders
                ],
            )
            for name in common
        },
    }


def compare(name: str, runs: Sequence[tuple[str, Utterances]]) -> Figures:
    """Compare the results of named runs on the same utterances, in any order.

    Returns the rates of each run, how far they are above those of the run with the fewest errors,
    and MAPSSWE between both. For a language without spaces between words, all counts are of
    characters, and there is no WER. Of two runs, it also returns the utterances whose errors
    differ most, the largest difference first.

    Raises DataError if the references differ.
    """
    by_words = all(have_words(utterances) for _, utterances in runs)
    sides = [_in_order(utterances, by_words) for _, utterances in runs]
    totals = [sum(one.errors.errors for one in side) for side in sides]
    best = totals.index(min(totals))
    for (run, _), side in zip(runs, sides, strict=True):
        _require_same_references(name, (run, side), (runs[best][0], sides[best]))
    ids = [one.id for one in sides[best]]
    speakers = [
        next((one.speaker for one in same if one.speaker), "") for same in zip(*sides, strict=True)
    ]
    units = units_of(ids, speakers)
    rows = [
        {
            "letter": letter,
            "run": run,
            "is_best": total == min(totals),
            **_rates(side, units, by_words),
            **({} if side is sides[best] else _above(side, sides[best], units, by_words)),
        }
        for letter, (run, _), side, total in zip(
            LETTERS[: len(runs)], runs, sides, totals, strict=True
        )
    ]
    counts = {
        UNITS[rate]: sum(_counts(sides[best], rate), ErrorCounts()).total
        for rate in _used_rates(by_words)
    }
    changed = _most_changed(*sides) if len(sides) == 2 else []
    return {"utterances": len(ids), **counts, "rows": rows, "changed": changed}


def _in_order(utterances: Utterances, by_words: bool) -> Utterances:
    alike = (replace(one, by_words=by_words) for one in utterances)
    return sorted(alike, key=lambda one: (one.id, one.reference))


def _used_rates(by_words: bool) -> list[str]:
    return [rate for rate in UNITS if by_words or rate == "CER"]


def _counts(side: Utterances, rate: str) -> list[ErrorCounts]:
    return [getattr(one.scores, UNITS[rate]) for one in side]


def _rates(side: Utterances, units: Units, by_words: bool) -> Figures:
    """Return the error rates of a run with their counts and intervals."""
    rates = {}
    for rate in _used_rates(by_words):
        counts = _counts(side, rate)
        total = sum(counts, ErrorCounts())
        interval = asdict(interval_of(counts, units))
        rates[rate] = {"rate": total.rate, "errors": total.errors, "interval": interval}
    return rates


def _above(side: Utterances, best: Utterances, units: Units, by_words: bool) -> Figures:
    """Return how far the rates of a run are above the best run's, and the test of both."""
    above = {}
    for rate in _used_rates(by_words):
        ours, theirs = _counts(side, rate), _counts(best, rate)
        difference = sum(ours, ErrorCounts()).rate - sum(theirs, ErrorCounts()).rate
        interval = asdict(interval_of(ours, units, minus=theirs))
        above[rate] = {"difference": difference, "interval": interval}
    triples = [
        (one.reference, one.hypothesis, other.hypothesis)
        for one, other in zip(side, best, strict=True)
    ]
    return {"above_best": above, "MAPSSWE": mapsswe(triples, by_words=by_words)}


def _most_changed(a: Utterances, b: Utterances) -> list[Figures]:
    def change(pair: tuple[ScoredUtterance, ScoredUtterance]) -> int:
        return abs(pair[0].errors.errors - pair[1].errors.errors)

    ordered = sorted(zip(a, b, strict=True), key=change, reverse=True)
    return [
        {
            "id": pair[0].id,
            "reference": pair[0].reference,
            "hypotheses": [one.hypothesis for one in pair],
            "errors": [one.errors.errors for one in pair],
        }
        for pair in ordered[:MAX_CHANGED]
        if change(pair)
    ]


def _require_same_references(
    name: str, a: tuple[str, Utterances], b: tuple[str, Utterances]
) -> None:
    (run_a, side_a), (run_b, side_b) = a, b
    if [(one.id, one.reference) for one in side_a] == [(one.id, one.reference) for one in side_b]:
        return
    texts_a, texts_b = ({one.id: one.reference for one in side} for side in (side_a, side_b))
    different = sorted(id for id in texts_a.keys() & texts_b if texts_a[id] != texts_b[id])
    example = (different or sorted(texts_a.keys() ^ texts_b.keys()) or [name])[0]
    raise DataError(
        f"The references of {name} differ, so that runs cannot be compared: "
        f"{len(texts_a.keys() - texts_b)} utterances are only in {run_a}, "
        f"{len(texts_b.keys() - texts_a)} only in {run_b}, and {len(different)} have another text, "
        f"such as {example}. Score both on the same data: sbkit score RUN DATA --out DIR."
    )


# ---- text and page


def describe_comparison(comparison: Figures) -> Iterator[str]:
    """Yield the lines of a table for each test set."""
    if comparison["not_in_all"]:
        yield f"not compared, because not in all runs: {', '.join(comparison['not_in_all'])}"
    for name, figures in comparison["test"].items():
        rows = figures["rows"]
        rates = [rate for rate in UNITS if rate in rows[0]]
        drawn = Interval(**rows[0][rates[0]]["interval"]).describe_units()
        totals = ", ".join(f"{figures[UNITS[rate]]} {UNITS[rate]}" for rate in rates)
        yield f"{name}: {figures['utterances']} utterances, {totals}; 95 % intervals over {drawn}"
        above = [f"{rate} above the best" for rate in rates]
        head = (" ", *(f"{rate} %" for rate in rates), *above, "MAPSSWE", "run")
        yield from _align_columns([head, *(_cells(row, rates) for row in rows)])
        if figures["changed"]:
            yield f"  changed most, in {UNITS[rates[0]].removesuffix('s')} errors:"
        for utterance in figures["changed"]:
            errors = ", ".join(
                f"{count} in {letter}"
                for letter, count in zip("AB", utterance["errors"], strict=True)
            )
            yield f"    {utterance['id']}: {errors}"
            texts = [utterance["reference"], *utterance["hypotheses"]]
            for label, text in zip(("reference", "A", "B"), texts, strict=True):
                yield f"      {label:<9}  {text}".rstrip()


def _cells(row: Figures, rates: Sequence[str]) -> tuple[str, ...]:
    own = [f"{100 * row[rate]['rate']:5.1f} ({_ends(row[rate]['interval'])})" for rate in rates]
    above = [""] * len(rates)
    if "above_best" in row:
        differences = [row["above_best"][rate] for rate in rates]
        above = [
            f"{100 * one['difference']:+.1f} ({_ends(one['interval'])})" for one in differences
        ]
    test = describe_test(row) if "MAPSSWE" in row else ""
    mark = "*" if row["is_best"] else " "
    return mark, *own, *above, test, f"{row['letter']}  {row['run']}"


def _ends(interval: Figures) -> str:
    """Write an interval without its units, which are the same for all."""
    return str(Interval(**interval)).partition(",")[0]


def _align_columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def describe_test(row: Figures) -> str:
    """Describe the result of MAPSSWE between a run and the best one, or why there is none."""
    test = row["MAPSSWE"]
    if test["p"] is None:
        return f"no test: {test['reason']}"
    p = f"p {test['p']:.3f}" if test["p"] >= 0.001 else "p < 0.001"
    text = f"{test['segments']} segments, {test['mean']:+.3f} errors each, Z {test['z']:.3f}, {p}"
    return text if test["p"] < SIGNIFICANCE_LEVEL else f"{text}: not significant"


def write_comparison(file: Path, comparison: Figures) -> None:
    """Write the page of two runs; it plays the clips that the report of one of them holds."""
    a, b = map(Path, comparison["runs"])
    clips = read_clips(a / REPORT) or read_clips(b / REPORT)
    write_report(
        file,
        [read_results(folder, read_figures(folder)) for folder in (a, b)],
        clips=lambda name, ids, max_bytes: {
            id: clips[name][id] for id in ids if id in clips.get(name, {})
        },
        compared=comparison["test"],
        notes=[
            f"{name}: {row['letter']} above the best: {describe_test(row)}"
            for name, figures in comparison["test"].items()
            for row in figures["rows"]
            if "MAPSSWE" in row
        ],
    )
