"""``sbkit compare``: two runs, or folders of scores, by what they made of the same test sets."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.base.regular import read_regular
from sbkit.text.interval import Interval, difference_interval
from sbkit.text.mapsswe import MatchedPairs, matched_pairs
from sbkit.text.wer import Scored, Scores, score, total_scores

PATTERN = "utterances_*.jsonl"
LARGEST = 1 << 32  # bytes
SHOWN = 3  # utterances that changed most


@dataclass(frozen=True)
class Comparison:
    """Two recognizers on one test set.

    difference: of the word error rates, the second less the first, with its interval; test: the
    matched pairs of their errors; better, worse: utterances that the second changed most.
    """

    name: str
    one: Scores
    other: Scores
    interval: Interval | None
    test: MatchedPairs
    better: tuple[str, ...]
    worse: tuple[str, ...]

    @property
    def difference(self) -> float:
        """Return by how much the word error rate changes."""
        return self.other.wer - self.one.wer

    def lines(self) -> Iterator[str]:
        """Yield what to print."""
        rates = [
            f"{name} {100 * a.rate:.1f} % ({a.errors} / {a.total}) -> "
            f"{100 * b.rate:.1f} % ({b.errors} / {b.total})"
            for name, a, b in (
                ("WER", self.one.words, self.other.words),
                ("CER", self.one.characters, self.other.characters),
            )
        ]
        yield f"{self.name}: {', '.join(rates)}, {self.one.utterances} utterances"
        interval = "" if self.interval is None else f" (95 % interval {self.interval})"
        yield f"  WER changes by {100 * self.difference:+.1f} points{interval}"
        test = self.test
        verdict = "alike" if test.z is None else f"Z {test.z:.3f}, p {test.p:.4f}"
        yield f"  matched pairs (MAPSSWE): {test.segments} segments, {verdict}"
        for word, utterances in (("better", self.better), ("worse", self.worse)):
            if utterances:
                yield f"  {word}: {', '.join(map(printable, utterances))}"

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "set": self.name,
            "WER": [self.one.wer, self.other.wer],
            "CER": [self.one.cer, self.other.cer],
            "difference": self.difference,
            "interval": None if self.interval is None else asdict(self.interval),
            "mapsswe": asdict(self.test),
            "better": self.better,
            "worse": self.worse,
        }


def compare(one: Path, other: Path) -> list[Comparison]:
    """Compare what two folders hold of the same test sets.

    Raises:
        SbkitError: a folder has no results, they have no set in common, or the references of a
            set differ.
    """
    first, second = _sets(one), _sets(other)
    common = [name for name in first if name in second]
    if not common:
        raise SbkitError(
            f"Two runs must have a test set in common to be compared, but {one} has "
            f"{', '.join(first)} and {other} has {', '.join(second)}. Score both on one set."
        )
    return [_compare(name, _read(first[name]), _read(second[name])) for name in common]


def _sets(folder: Path) -> dict[str, Path]:
    files = sorted(folder.glob(PATTERN)) if folder.is_dir() else []
    if not files:
        raise SbkitError(
            f"A run or the --out of `sbkit score` must have {PATTERN}, but {folder} has none. Test "
            "it again with this version of sbkit."
        )
    return {file.stem.removeprefix("utterances_"): file for file in files}


def _read(file: Path) -> dict[str, Scored]:
    content = read_regular(file, largest=LARGEST, what="The results of a test set")
    try:
        rows = [json.loads(line) for line in content.decode().splitlines()]
        scored = [
            score(*(str(row[key]) for key in ("id", "reference", "hypothesis", "speaker")))
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SbkitError(
            f"{file} must hold a line of JSON for each utterance, but cannot be read "
            f"({type(error).__name__}). Test again."
        ) from error
    return {each.id: each for each in scored}


def _compare(name: str, one: dict[str, Scored], other: dict[str, Scored]) -> Comparison:
    _refuse_other_set(name, one, other)
    pairs = [(one[id], other[id]) for id in sorted(one)]
    words = [[each.scores.words for each in side] for side in zip(*pairs, strict=True)] or [[], []]
    gains = sorted((b.scores.words.errors - a.scores.words.errors, a.id) for a, b in pairs)
    return Comparison(
        name=name,
        one=total_scores(a for a, _ in pairs),
        other=total_scores(b for _, b in pairs),
        interval=difference_interval(
            [each.errors for each in words[1]],
            [each.errors for each in words[0]],
            [each.total for each in words[0]],
            [a.speaker for a, _ in pairs],
        ),
        test=matched_pairs(*_texts(pairs)),
        better=tuple(id for change, id in gains[:SHOWN] if change < 0),
        worse=tuple(id for change, id in reversed(gains[-SHOWN:]) if change > 0),
    )


def _texts(pairs: Sequence[tuple[Scored, Scored]]) -> tuple[list[str], list[str], list[str]]:
    return (
        [a.reference for a, _ in pairs],
        [a.hypothesis for a, _ in pairs],
        [b.hypothesis for _, b in pairs],
    )


def _refuse_other_set(name: str, one: dict[str, Scored], other: dict[str, Scored]) -> None:
    alone = sorted(one.keys() ^ other.keys())
    changed = [id for id in sorted(one) if id in other and one[id].reference != other[id].reference]
    if alone or changed:
        what = (
            f"{printable(alone[0])} is in one only"
            if alone
            else (f"{printable(changed[0])} has another reference")
        )
        raise SbkitError(
            f"The set {name} must be the same in both, with the same references, but "
            f"{len(alone) + len(changed)} of its utterances differ ({what}). Score both models on "
            "one set, with one normalizer."
        )
