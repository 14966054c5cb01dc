"""Two runs beside each other: are their errors on the same test sets different?

RUN_A, RUN_B: run folders, or folders of `sbkit score --out` -> the utterances of the test sets of
both, with the same references -> rates, their difference, MAPSSWE -> text, plain data or a page
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.evaluate.interval import (
    Interval,
    Units,
    errors_of,
    interval_of,
    rate_interval,
    totals_of,
    units_of,
)
from sbkit.evaluate.mapsswe import Mapsswe, mapsswe
from sbkit.evaluate.report import REPORT, write_report
from sbkit.evaluate.run_results import read_clips, read_figures, read_results
from sbkit.evaluate.utterances import list_test_sets, read_utterances, utterances_file
from sbkit.evaluate.wer import ErrorCounts, Scored, have_words

LEVEL = 0.05  # a difference with a smaller p is significant
MOST = 10  # utterances that are shown
COUNTED = {"WER": "words", "CER": "characters"}


@dataclass(frozen=True, kw_only=True)
class TwoRates:
    """An error rate of A and of B over the same references, and their difference A - B."""

    a: ErrorCounts
    b: ErrorCounts
    interval_a: Interval
    interval_b: Interval
    difference_interval: Interval

    @property
    def difference(self) -> float:
        """Return the rate of A minus that of B, as a fraction."""
        return self.a.rate - self.b.rate


@dataclass(frozen=True, kw_only=True)
class Changed:
    """One utterance in which A and B have different numbers of errors."""

    a: Scored
    b: Scored

    @property
    def difference(self) -> int:
        """Return the errors of A minus those of B: of words, or else of characters."""
        return self.a.errors.errors - self.b.errors.errors


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference in one test set.

    rates: WER and CER, or CER alone for a language that writes no spaces between words, in which
    all counts are of characters; changed: the utterances whose errors changed most, the largest
    change first.
    """

    name: str
    utterances: int
    unit: str
    rates: dict[str, TwoRates]
    mapsswe: Mapsswe
    changed: tuple[Changed, ...]


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The folders of both runs, their common test sets, and the names of the others."""

    a: Path
    b: Path
    test: tuple[Comparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare_runs(a: Path, b: Path) -> RunComparison:
    """Compare every test set that both have.

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
    sides = {
        name: [read_utterances(utterances_file(each, name)) for each in (a, b)] for name in common
    }
    return RunComparison(
        a=a,
        b=b,
        test=tuple(compare(name, *both) for name, both in sides.items()),
        only_a=tuple(name for name in names_a if name not in common),
        only_b=tuple(name for name in names_b if name not in common),
    )


def compare(name: str, a: Sequence[Scored], b: Sequence[Scored]) -> Comparison:
    """Compare the results of two systems on the same ids and references, in any order.

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
    pairs = [Changed(a=one, b=other) for one, other in zip(a, b, strict=True)]
    units = units_of([each.id for each in a], [each.a.speaker or each.b.speaker for each in pairs])
    words, characters = (
        _two_rates(*([getattr(each.scores, unit) for each in side] for side in (a, b)), units=units)
        for unit in ("words", "characters")
    )
    by_change = sorted(pairs, key=lambda each: -abs(each.difference))
    return Comparison(
        name=name,
        utterances=len(pairs),
        unit="word" if by_words else "character",
        rates={"WER": words, "CER": characters} if by_words else {"CER": characters},
        mapsswe=mapsswe(
            [each.reference for each in a],
            [each.hypothesis for each in a],
            [each.hypothesis for each in b],
            by_words=by_words,
        ),
        changed=tuple(each for each in by_change[:MOST] if each.difference),
    )


def _two_rates(a: Sequence[ErrorCounts], b: Sequence[ErrorCounts], *, units: Units) -> TwoRates:
    return TwoRates(
        a=sum(a, ErrorCounts()),
        b=sum(b, ErrorCounts()),
        interval_a=interval_of(a, units),
        interval_b=interval_of(b, units),
        difference_interval=rate_interval(errors_of(a) - errors_of(b), totals_of(a), units),
    )


def _other_references(name: str, a: Sequence[Scored], b: Sequence[Scored]) -> SbkitError:
    texts_a, texts_b = ({each.id: each.reference for each in side} for side in (a, b))
    other = sorted(id for id in texts_a.keys() & texts_b if texts_a[id] != texts_b[id])
    example = (other or sorted(texts_a.keys() ^ texts_b.keys()) or [name])[0]
    return SbkitError(
        f"Two runs must have the same references to be compared, but those of {name} differ: "
        f"{len(texts_a.keys() - texts_b)} utterances are only in A, "
        f"{len(texts_b.keys() - texts_a)} only in B, and {len(other)} have another text, such as "
        f"{example}. Score both on the same data: sbkit score RUN DATA --out DIR."
    )


def describe_comparison(compared: RunComparison) -> Iterator[str]:
    """Yield the lines that say how two runs differ."""
    for side, folder, only in (
        ("A", compared.a, compared.only_a),
        ("B", compared.b, compared.only_b),
    ):
        left = f" (not compared, because only here: {', '.join(only)})" if only else ""
        yield f"{side}: {folder}{left}"
    for comparison in compared.test:
        yield from _describe_set(comparison)


def _describe_set(comparison: Comparison) -> Iterator[str]:
    totals = [f"{rates.a.total} {COUNTED[name]}" for name, rates in comparison.rates.items()]
    drawn = comparison.rates["CER"].difference_interval.describe_units()
    yield (
        f"{comparison.name}: {comparison.utterances} utterances, {', '.join(totals)}; "
        f"95 % intervals over {drawn}"
    )
    for name, rates in comparison.rates.items():
        for side, counts, interval in (
            ("A", rates.a, rates.interval_a),
            ("B", rates.b, rates.interval_b),
        ):
            yield (
                f"  {name} {side:<5} {100 * counts.rate:6.1f} % "
                f"({counts.errors} / {counts.total}; {interval})"
            )
        points = f"{100 * rates.difference:+6.1f} points"
        yield f"  {name} A - B {points} ({rates.difference_interval})"
    yield f"  MAPSSWE: {describe_test(comparison)}"
    if comparison.changed:
        yield f"  changed most, in {comparison.unit} errors:"
    for changed in comparison.changed:
        a, b = changed.a, changed.b
        yield f"    {a.id}: {a.errors.errors} in A, {b.errors.errors} in B"
        for name, text in (("reference", a.reference), ("A", a.hypothesis), ("B", b.hypothesis)):
            yield f"      {name:<9}  {text}".rstrip()


def describe_test(comparison: Comparison) -> str:
    """Write the result of MAPSSWE, or why there is none."""
    test = comparison.mapsswe
    if test.z is None or test.p is None:
        return f"no test: {test.reason}"
    p = f"p {test.p:.3f}" if test.p >= 0.001 else "p < 0.001"
    found = (
        f"{test.segment_count} segments, A - B {test.mean:+.3f} errors each, Z {test.z:.3f}, {p}"
    )
    if test.p >= LEVEL:
        return f"{found}: no significant difference"
    return f"{found}: {'B' if test.z > 0 else 'A'} makes fewer {comparison.unit} errors"


def comparison_figures(compared: RunComparison) -> dict[str, Any]:
    """Return how two runs differ as plain data."""
    return {
        "a": str(compared.a),
        "b": str(compared.b),
        "only_a": compared.only_a,
        "only_b": compared.only_b,
        "test": {each.name: _set_figures(each) for each in compared.test},
    }


def _set_figures(comparison: Comparison) -> dict[str, Any]:
    test, unit = comparison.mapsswe, comparison.unit
    return {
        "utterances": comparison.utterances,
        **{name: _rate_figures(rates) for name, rates in comparison.rates.items()},
        "MAPSSWE": {
            "segments": test.segment_count,
            "mean": test.mean,
            "z": test.z,
            "p": test.p,
            **({"reason": test.reason} if test.reason else {}),
        },
        "changed": [
            {
                "id": each.a.id,
                "reference": each.a.reference,
                "a": each.a.hypothesis,
                "b": each.b.hypothesis,
                f"{unit}_errors_a": each.a.errors.errors,
                f"{unit}_errors_b": each.b.errors.errors,
            }
            for each in comparison.changed
        ],
    }


def _rate_figures(rates: TwoRates) -> dict[str, Any]:
    a, b = (
        {"rate": counts.rate, "errors": counts.errors, "interval": interval.plain()}
        for counts, interval in ((rates.a, rates.interval_a), (rates.b, rates.interval_b))
    )
    return {
        "total": rates.a.total,
        "a": a,
        "b": b,
        "difference": rates.difference,
        "difference_interval": rates.difference_interval.plain(),
    }


def write_comparison(file: Path, compared: RunComparison) -> None:
    """Write the page of both; it plays the clips that the reports of either run hold."""
    folders = (compared.a, compared.b)
    known = [read_clips(folder / REPORT) for folder in folders]

    def clips(name: str, ids: list[str], most: int) -> dict[str, str]:
        held = {id: clip for each in reversed(known) for id, clip in each.get(name, {}).items()}
        found: dict[str, str] = {}
        for id in ids:
            if id in held and (most := most - len(held[id])) >= 0:
                found[id] = held[id]
        return found

    write_report(
        file,
        [read_results(folder, read_figures(folder)) for folder in folders],
        clips=clips,
        compared=comparison_figures(compared)["test"],
        notes=[f"{each.name}: {describe_test(each)}" for each in compared.test],
    )
