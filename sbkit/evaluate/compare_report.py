"""A comparison of two runs: for the screen, as plain data, and as a page of both side by side."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from sbkit.base.errors import SbkitError
from sbkit.evaluate.compare import Changed, Comparison, RunComparison, TwoRates, read_figures
from sbkit.evaluate.interval import Interval
from sbkit.evaluate.intervals import describe_interval, describe_units, interval_figures
from sbkit.evaluate.report import REPORT, write_report
from sbkit.evaluate.run_results import read_clips, read_results
from sbkit.evaluate.wer import ErrorCounts

LEVEL = 0.05  # below it a difference is called one


def describe_comparison(compared: RunComparison, a: Path, b: Path) -> Iterator[str]:
    """Yield the lines that say how two runs differ; ``a`` and ``b`` are their folders."""
    for side, folder, only in (("A", a, compared.only_a), ("B", b, compared.only_b)):
        yield f"{side}: {folder}{_describe_alone(only)}"
    for comparison in compared.test:
        yield from _describe_set(comparison)


def _describe_alone(names: tuple[str, ...]) -> str:
    return f" (not compared, because only here: {', '.join(names)})" if names else ""


def _describe_set(comparison: Comparison) -> Iterator[str]:
    drawn = comparison.wer.difference_interval
    words = f"{comparison.wer.a.total} words, " if comparison.by_words else ""
    yield (
        f"{comparison.name}: {comparison.utterances} utterances, {words}{comparison.cer.a.total} "
        f"characters; 95 % intervals over {describe_units(drawn.unit, drawn.unit_count)}"
    )
    for name, rates in _rates(comparison).items():
        yield from _describe_rates(name, rates)
    yield f"  MAPSSWE: {describe_test(comparison)}"
    if comparison.changed:
        yield f"  changed most, in {comparison.unit} errors:"
    for changed in comparison.changed:
        yield from _describe_changed(changed)


def _rates(comparison: Comparison) -> dict[str, TwoRates]:
    both = {"WER": comparison.wer, "CER": comparison.cer}
    return both if comparison.by_words else {"CER": comparison.cer}


def _describe_rates(name: str, rates: TwoRates) -> Iterator[str]:
    for side, counts, interval in (
        ("A", rates.a, rates.interval_a),
        ("B", rates.b, rates.interval_b),
    ):
        yield (
            f"  {name} {side:<5} {100 * counts.rate:6.1f} % "
            f"({counts.errors} / {counts.total}; {describe_interval(interval)})"
        )
    points, interval = 100 * rates.difference, rates.difference_interval
    yield f"  {name} A - B {points:+6.1f} points ({describe_interval(interval)})"


def describe_test(comparison: Comparison) -> str:
    """Write what MAPSSWE found, or why it found nothing."""
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


def _describe_changed(changed: Changed) -> Iterator[str]:
    a, b = (each.errors.errors for each in (changed.a, changed.b))
    yield f"    {changed.a.id}: {a} in A, {b} in B"
    for name, text in (
        ("reference", changed.a.reference),
        ("A", changed.a.hypothesis),
        ("B", changed.b.hypothesis),
    ):
        yield f"      {name:<9}  {text}".rstrip()


def comparison_figures(compared: RunComparison, a: Path, b: Path) -> dict[str, Any]:
    """Return how two runs differ as plain data; ``a`` and ``b`` are their folders."""
    return {
        "a": str(a),
        "b": str(b),
        "only_a": compared.only_a,
        "only_b": compared.only_b,
        "test": {each.name: _set_figures(each) for each in compared.test},
    }


def _set_figures(comparison: Comparison) -> dict[str, Any]:
    test = comparison.mapsswe
    return {
        "utterances": comparison.utterances,
        **{name: _rate_figures(rates) for name, rates in _rates(comparison).items()},
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
                f"{comparison.unit}_errors_a": each.a.errors.errors,
                f"{comparison.unit}_errors_b": each.b.errors.errors,
            }
            for each in comparison.changed
        ],
    }


def _rate_figures(rates: TwoRates) -> dict[str, Any]:
    return {
        "total": rates.a.total,
        "a": _side(rates.a, rates.interval_a),
        "b": _side(rates.b, rates.interval_b),
        "difference": rates.difference,
        "difference_interval": interval_figures(rates.difference_interval),
    }


def _side(counts: ErrorCounts, interval: Interval) -> dict[str, Any]:
    return {
        "rate": counts.rate,
        "errors": counts.errors,
        "interval": interval_figures(interval),
    }


def write_comparison(file: Path, compared: RunComparison, a: Path, b: Path) -> None:
    """Write the page; what can be heard is what the reports of ``a`` and ``b`` hold.

    Raises:
        SbkitError: a file of either is not what its name says.
    """
    heard = [read_clips(folder / REPORT) for folder in (a, b)]

    def clips(name: str, ids: list[str], most: int) -> dict[str, str]:
        known = {id: clip for each in reversed(heard) for id, clip in each.get(name, {}).items()}
        found: dict[str, str] = {}
        for id in ids:
            if id in known and (most := most - len(known[id])) >= 0:
                found[id] = known[id]
        return found

    try:
        write_report(
            file,
            [read_results(folder, read_figures(folder)) for folder in (a, b)],
            clips=clips,
            compared=comparison_figures(compared, a, b)["test"],
            notes=[f"{each.name}: {describe_test(each)}" for each in compared.test],
        )
    except (TypeError, ValueError, KeyError, AttributeError, TemplateError) as error:
        raise SbkitError(
            f"The figures, log and data report in {a} and {b} must be as sbkit wrote them, but one "
            f"is not ({str(error)[:200]}). Score again: sbkit score RUN DATA --out DIR."
        ) from error
