"""Compare runs: which recognizer makes the fewest errors, and do the others really make more?

run folders, or folders of `sbkit score --out` -> the utterances of their common test sets
-> rates and settings as plain data -> a table. For other tasks, the table has their metrics.

An interval is valid for one pair of runs. Among many runs, one is the best by chance.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from sbkit.base.errors import DataError
from sbkit.base.messages import align_columns, short_value
from sbkit.config.hparams import OUTPUT_FOLDER
from sbkit.evaluate.intervals import Interval, group_by_speaker, intervals_of
from sbkit.evaluate.run_results import SETTINGS_FIELD, read_results
from sbkit.evaluate.wer import (
    ERROR_RATES,
    ErrorCounts,
    FigureDict,
    ScoredUtterance,
    all_have_word_boundaries,
    counts_of_each,
)
from sbkit.evaluate.wer_report import (
    hash_references,
    read_utterances,
    utterances_file,
)
from sbkit.lm.language_models import SEEN, describe_seen
from sbkit.logs.metric import percent

MAX_CHANGED_UTTERANCES = 10
# Columns by their names in a run's summary: title, unit and format
COSTS = {"parameters": ("M parameters", 1e6, ".1f"), "train_seconds": ("minutes", 60, ".1f")}
COMPUTED_PREFIXES = ("<", "!apply:")  # of paths in the run folder, and of computed values

RunSettings = Mapping[str, Any]


class ComparedRun(NamedTuple):
    """The utterances of a test set as a run recognized them."""

    name: str
    utterances: Sequence[ScoredUtterance]

    def in_order(self, *, by_words: bool) -> "ComparedRun":
        utterances = (replace(utterance, by_words=by_words) for utterance in self.utterances)
        return ComparedRun(self.name, sorted(utterances, key=lambda utterance: utterance.key))

    def normalized(self) -> "ComparedRun":
        """Use the texts without case and punctuation, where the run keeps them."""
        texts = [utterance.normalized or utterance for utterance in self.utterances]
        return ComparedRun(self.name, texts)

    @property
    def num_errors(self) -> tuple[int, int]:
        """The errors in words (in characters without spaces between words), then in characters."""
        errors = [(u.counts.errors, u.errors.characters.errors) for u in self.utterances]
        return sum(count for count, _ in errors), sum(count for _, count in errors)


def compare_runs(folders: Sequence[Path | str]) -> FigureDict:
    """Compare runs, or folders of `sbkit score --out`, on every common test set."""
    runs = [*map(Path, folders)]
    results_of_runs = [read_results(folder) for folder in runs]
    tests = [results["test"] for results in results_of_runs]
    names = list(dict.fromkeys(chain.from_iterable(tests)))
    common = [name for name in names if all(name in sets for sets in tests)]
    if not common:
        pairs = zip(runs, tests, strict=True)
        available = (f"{run} has {', '.join(sets) or 'none'}" for run, sets in pairs)
        raise DataError(
            f"The runs have no common test set: {'; '.join(available)}. Score them on the same "
            "data: sbkit score RUN DATA --out DIR"
        )
    test: FigureDict = {}
    for name in common:
        if all(utterances_file(folder, name).exists() for folder in runs):
            utterances = [read_utterances(utterances_file(folder, name)) for folder in runs]
            test[name] = compare(name, [*map(ComparedRun, map(str, runs), utterances)])
        else:
            test[name] = _figures(name, runs, [sets[name] for sets in tests])
        for row, results in zip(test[name]["rows"], results_of_runs, strict=True):
            row[SEEN] = results["test"].get(name, {}).get(SEEN)
            before = results.get("before_training", {}).get(name, {})
            row["before_training"] = {rate: before[rate] for rate in ERROR_RATES if rate in before}
            row |= {fact: results.get(fact) for fact in COSTS}
    settings = {
        letter: {
            **results.get(SETTINGS_FIELD, {}),
            "decoder": results["test"].get(common[0], {}).get("decoder"),
        }
        for letter, results in zip(_letters(len(runs)), results_of_runs, strict=True)
    }
    return {
        "runs": [str(folder) for folder in runs],
        "not_in_all": [name for name in names if name not in common],
        "test": test,
        "settings": differing_settings(settings),
    }


def _figures(name: str, runs: Sequence[Path], figures: Sequence[FigureDict]) -> FigureDict:
    """Return the metrics of runs whose task writes no texts, and the counts that they share."""
    counts = [{key: n for key, n in values.items() if type(n) is int} for values in figures]
    metrics = [  # null for a rate over nothing
        {key: x for key, x in values.items() if x is None or type(x) is float} for values in figures
    ]
    if any(count != counts[0] for count in counts) or len({*map(frozenset, metrics)}) > 1:
        tests = (f"{run} on {count}" for run, count in zip(runs, counts, strict=True))
        raise DataError(
            f"The runs were tested on other data or with other metrics in {name}: "
            f"{'; '.join(tests)}. Score them on the same data: sbkit score RUN DATA --out DIR"
        )
    rows = [
        {"letter": letter, "run": str(run), "metrics": values}
        for letter, run, values in zip(_letters(len(runs)), runs, metrics, strict=True)
    ]
    return {**counts[0], "rows": rows}


def _letters(count: int) -> list[str]:
    return [*ascii_uppercase, *map(str, range(27, count + 1))][:count]


def compare(name: str, runs: Sequence[ComparedRun]) -> FigureDict:
    """Compare runs on the same utterances, in any order.

    Returns the rates of each run and how far they are above the rates of the best run, which has
    the fewest errors of words, and of characters among equals. For two runs, also returns the
    utterances whose errors differ most, the largest difference first. A language without spaces
    between words has no WER.
    """
    is_normalized = len({hash_references(run.utterances) for run in runs}) > 1
    if is_normalized:
        runs = [run.normalized() for run in runs]
    by_words = all(all_have_word_boundaries(run.utterances) for run in runs)
    runs = [run.in_order(by_words=by_words) for run in runs]
    best = min(runs, key=lambda run: run.num_errors)
    for run in runs:
        _require_same_references(name, run, best)
    speakers = [
        next((utterance.speaker for utterance in versions if utterance.speaker), "")
        for versions in zip(*(run.utterances for run in runs), strict=True)
    ]
    grouping = group_by_speaker([utterance.id for utterance in best.utterances], speakers)
    best_counts = counts_of_each(best.utterances, by_words=by_words)
    best_totals = {rate: sum(counts, ErrorCounts()) for rate, counts in best_counts.items()}
    rows: list[FigureDict] = []
    for letter, run in zip(_letters(len(runs)), runs, strict=True):
        rank = sum(other.num_errors < run.num_errors for other in runs)
        row: FigureDict = {"letter": letter, "run": run.name, "is_best": not rank, "rank": rank}
        counts = counts_of_each(run.utterances, by_words=by_words)
        for rate, interval in intervals_of(counts, grouping).items():
            total = sum(counts[rate], ErrorCounts())
            row[rate] = {"rate": total.rate, "errors": total.errors, "interval": interval}
        if run is not best:
            row["above_best"] = {}
            for rate, interval in intervals_of(counts, grouping, minus=best_counts).items():
                difference = row[rate]["rate"] - best_totals[rate].rate
                row["above_best"][rate] = {"difference": difference, "interval": interval}
        rows.append(row)
    return {
        "utterances": len(best.utterances),
        "normalized": is_normalized,
        **{ERROR_RATES[rate].units: total.reference_length for rate, total in best_totals.items()},
        "rows": rows,
        "changed": _most_changed(*runs) if len(runs) == 2 else [],
    }


def _require_same_references(name: str, run: ComparedRun, best: ComparedRun) -> None:
    keys = Counter(utterance.key for utterance in run.utterances)
    best_keys = Counter(utterance.key for utterance in best.utterances)
    if different := (keys - best_keys) | (best_keys - keys):
        raise DataError(
            f"The references of {name} in {run.name} and {best.name} differ, for example in "
            f"{min(different)[0]}. Score both on the same data: sbkit score RUN DATA --out DIR"
        )


def _most_changed(a: ComparedRun, b: ComparedRun) -> list[FigureDict]:
    def change(pair: tuple[ScoredUtterance, ScoredUtterance]) -> int:
        return abs(pair[0].counts.errors - pair[1].counts.errors)

    changed = filter(change, zip(a.utterances, b.utterances, strict=True))
    return [
        {
            "id": in_a.id,
            "reference": in_a.reference,
            "hypotheses": [in_a.hypothesis, in_b.hypothesis],
            "errors": [in_a.counts.errors, in_b.counts.errors],
        }
        for in_a, in_b in sorted(changed, key=change, reverse=True)[:MAX_CHANGED_UTTERANCES]
    ]


# ---- text


def describe_comparison(comparison: FigureDict) -> Iterator[str]:
    """Yield the lines of a table for each test set."""
    if comparison["not_in_all"]:
        yield f"not compared, because not in all runs: {', '.join(comparison['not_in_all'])}"
    for name, figures in comparison["test"].items():
        if "metrics" in figures["rows"][0]:
            yield f"{name}: {figures['utterances']} utterances"
            metrics = [*figures["rows"][0]["metrics"]]
            lines = [(*metrics, "run")]
            for row in figures["rows"]:
                values = [row["metrics"][metric] for metric in metrics]
                texts = ["none" if value is None else f"{value:.4g}" for value in values]
                lines.append((*texts, f"{row['letter']}  {row['run']}"))
            yield from align_columns(lines)
            continue
        rows = sorted(figures["rows"], key=itemgetter("rank"))
        rates = [rate for rate in ERROR_RATES if rate in rows[0]]
        groups = rows[0][rates[0]]["interval"].describe_units()
        units = [ERROR_RATES[rate].units for rate in rates]
        lengths = ", ".join(f"{figures[unit]} {unit}" for unit in units)
        kind = "normalized utterances" if figures["normalized"] else "utterances"
        yield f"{name}: {figures['utterances']} {kind}, {lengths}; 95 % intervals over {groups}"
        above = [f"{rate} above the best" for rate in rates]
        costs = [fact for fact in COSTS if any(row.get(fact) for row in rows)]
        titles = (*(f"{rate} %" for rate in rates), *above, *(COSTS[fact][0] for fact in costs))
        lines = [(" ", *titles, "run"), *(_cells(row, rates, costs) for row in rows)]
        yield from align_columns(lines)
        for row in rows:
            if before := row.get("before_training"):
                texts = [f"{rate} {percent(before[rate])}" for rate in before]
                yield f"  {row['letter']}: before training: {', '.join(texts)}"
            if row.get(SEEN) is not None:
                yield f"  {row['letter']}: {describe_seen(row[SEEN])}"
        if figures["changed"]:
            yield f"  changed most, in {'word' if 'WER' in rates else 'character'} errors:"
        for change in figures["changed"]:
            in_a, in_b = change["errors"]
            yield f"    {change['id']}: {in_a} in A, {in_b} in B"
            texts = [change["reference"], *change["hypotheses"]]
            for label, text in zip(("reference", "A", "B"), texts, strict=True):
                yield f"      {label:<9}  {text}".rstrip()
    yield from describe_settings(comparison["settings"])


def _cells(row: FigureDict, rates: Sequence[str], costs: Sequence[str]) -> tuple[str, ...]:
    def cell(share: float, form: str, interval: Interval) -> str:
        number = "none" if math.isnan(share) else format(100 * share, form)
        return f"{number} ({interval.format_ends()})"

    mark = "*" if row["is_best"] else " "
    values = [cell(row[rate]["rate"], "5.1f", row[rate]["interval"]) for rate in rates]
    for rate in rates:
        above = row.get("above_best", {}).get(rate)
        values.append(cell(above["difference"], "+.1f", above["interval"]) if above else "")
    for fact in costs:
        _, unit, form = COSTS[fact]
        values.append(format(row[fact] / unit, form) if row.get(fact) else "")
    return mark, *values, f"{row['letter']}  {row['run']}"


# ---- settings


def differing_settings(runs: Mapping[str, RunSettings]) -> dict[str, RunSettings]:
    """Return the value of each differing setting in each run, by the runs' names; null if missing.

    A value inside an object that follows from a setting is left out: `CNN.d_model` follows from
    `d_model`. A bundle has only a few settings, so only these are compared with it.
    """
    differing: dict[str, RunSettings] = {}
    are_runs = all(OUTPUT_FOLDER in settings for settings in runs.values())
    names = dict.fromkeys(chain.from_iterable(runs.values()))
    if not are_runs:
        names = {name: None for name in names if all(name in values for values in runs.values())}
    for name in sorted(names, key=lambda name: "." in name):  # settings before values inside
        values = {run: settings.get(name) for run, settings in runs.items()}
        in_order = [*values.values()]
        is_same = in_order == in_order[:1] * len(in_order)
        is_computed = any(str(value).startswith(COMPUTED_PREFIXES) for value in values.values())
        causes = [differing[cause] for cause in differing if "." not in cause]
        # Two settings may well change from false to true, but not from 144 to 96.
        is_distinctive = not any(value in (True, False, None) for value in values.values())
        follows = "." in name and is_distinctive and values in causes
        if not (is_same or is_computed or follows or name == OUTPUT_FOLDER):
            differing[name] = values
    return differing


def describe_settings(differing: Mapping[str, RunSettings]) -> Iterator[str]:
    """Yield a line for each differing setting: `lr: 0.0025 in A and C, 0.001 in B`."""
    if differing:
        yield "settings that differ:"
    for name, values in differing.items():
        runs_of: dict[str, list[str]] = {}
        for run, value in values.items():
            runs_of.setdefault(short_value(value), []).append(run)
        texts = (f"{value} in {' and '.join(runs)}" for value, runs in runs_of.items())
        yield f"  {name}: {', '.join(texts)}"
