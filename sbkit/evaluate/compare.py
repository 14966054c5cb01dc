"""Two runs beside each other: are their errors on the same test sets different?

RUN_A, RUN_B: run folders, or folders of `sbkit score --out` -> the test sets of both -> the
utterances of each, refused unless the references are the same -> rates, their difference, MAPSSWE
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular
from sbkit.evaluate.interval import Interval, Units, rate_interval, units_of
from sbkit.evaluate.intervals import errors_of, interval_of, totals_of
from sbkit.evaluate.mapsswe import Mapsswe, mapsswe
from sbkit.evaluate.utterances import hash_references, read_utterances, utterances_file
from sbkit.evaluate.wer import ErrorCounts, Scored, have_words

FIGURES = ("summary.json", "scores.json")  # of a run, of `sbkit score --out`
LARGEST = 64 << 20  # bytes of these
MOST = 10  # utterances that are shown


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
    """What is different in one test set.

    ``changed`` are the utterances whose errors changed most, the largest change first. They and the
    test count words, and where ``by_words`` is false, in a language that writes no spaces between
    words, characters.
    """

    name: str
    utterances: int
    by_words: bool
    wer: TwoRates
    cer: TwoRates
    mapsswe: Mapsswe
    changed: tuple[Changed, ...]

    @property
    def unit(self) -> str:
        """Return what is counted, in the singular."""
        return "word" if self.by_words else "character"


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The test sets that both runs have, and the names of those that only one has."""

    test: tuple[Comparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare_runs(a: Path, b: Path) -> RunComparison:
    """Compare every test set that both have.

    Raises:
        SbkitError: one has no results, no test set is in both, or the references of one differ.
    """
    hashes_a, hashes_b = _test_sets(a), _test_sets(b)
    common = [name for name in hashes_a if name in hashes_b]
    if not common:
        raise SbkitError(
            f"Two runs must have a test set of the same name to be compared, but {a} has "
            f"{_named(hashes_a)} and {b} has {_named(hashes_b)}. Score both on the same data: "
            "sbkit score RUN DATA --out DIR."
        )
    compared = []
    for name in common:
        of_a, of_b = _utterances(a, name, hashes_a[name]), _utterances(b, name, hashes_b[name])
        if hashes_a[name] != hashes_b[name]:
            raise _other_references(name, of_a, of_b)
        compared.append(compare(name, of_a, of_b))
    return RunComparison(
        test=tuple(compared),
        only_a=tuple(name for name in hashes_a if name not in common),
        only_b=tuple(name for name in hashes_b if name not in common),
    )


def compare(name: str, a: Sequence[Scored], b: Sequence[Scored]) -> Comparison:
    """Compare the results of two systems on the same ids and references, in any order."""
    by_words = have_words([*a, *b])
    a, b = (
        sorted(
            (replace(each, by_words=by_words) for each in side),
            key=lambda each: (each.id, each.reference),
        )
        for side in (a, b)
    )
    pairs = [Changed(a=one, b=other) for one, other in zip(a, b, strict=True)]
    speakers = [each.a.speaker or each.b.speaker for each in pairs]
    units = units_of([each.id for each in a], speakers)
    words = ([each.scores.words for each in side] for side in (a, b))
    characters = ([each.scores.characters for each in side] for side in (a, b))
    by_change = sorted(pairs, key=lambda each: -abs(each.difference))
    return Comparison(
        name=name,
        utterances=len(pairs),
        by_words=by_words,
        wer=_two_rates(*words, units=units),
        cer=_two_rates(*characters, units=units),
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


def _named(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def read_figures(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of every test set of a run, or of a folder of scores.

    Raises:
        SbkitError: there are none, or they are of no recognizer.
    """
    file = next((folder / name for name in FIGURES if (folder / name).exists()), None)
    if file is None:
        raise SbkitError(
            f"{folder} must be a run that was tested, or a folder of scores, but has neither "
            f"{' nor '.join(FIGURES)}. Finish the run, or: sbkit score RUN DATA --out DIR."
        )
    content = read_regular(file, largest=LARGEST, what="The figures of a run")
    try:
        test = json.loads(content)["test"].items()
        return {
            str(name): {**entry, "references": str(entry["references"])} for name, entry in test
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SbkitError(
            f"Every test set in {file} must have the hash of its `references`, but not all do: it "
            "is of a classifier, or of an earlier sbkit. Score that recognizer again: sbkit score "
            "RUN DATA --out DIR."
        ) from error


def _test_sets(folder: Path) -> dict[str, str]:
    """Return the hash of the references of every test set, which the figures are written with."""
    return {name: entry["references"] for name, entry in read_figures(folder).items()}


def _utterances(folder: Path, name: str, expected: str) -> list[Scored]:
    if Path(name).name != name:
        raise SbkitError(
            f"The name of a test set must be that of a file, but in {folder} one is {name!r}. "
            "Score again: sbkit score RUN DATA --out DIR."
        )
    file = utterances_file(folder, name)
    scored = read_utterances(file)
    if hash_references(scored) != expected:
        raise SbkitError(
            f"{file} must have the references that the figures beside it were computed with, but "
            "has others. Score again: sbkit score RUN DATA --out DIR."
        )
    return scored


def _other_references(name: str, a: Sequence[Scored], b: Sequence[Scored]) -> SbkitError:
    texts_a, texts_b = ({each.id: each.reference for each in side} for side in (a, b))
    other = sorted(id for id in texts_a.keys() & texts_b if texts_a[id] != texts_b[id])
    alone = sorted(texts_a.keys() ^ texts_b.keys())
    example = (other or alone or [name])[0]
    return SbkitError(
        f"Two runs must have the same references to be compared, but those of {name} differ: "
        f"{len(texts_a.keys() - texts_b)} utterances are only in A, "
        f"{len(texts_b.keys() - texts_a)} only in B, and {len(other)} have another text, such as "
        f"{example}. Score both on the same data: sbkit score RUN DATA --out DIR."
    )
