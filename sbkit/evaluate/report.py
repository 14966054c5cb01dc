"""``report.html``: the results of a run, or of two side by side, as one page to be mailed.

results -> for each test set the chosen utterances, frequent errors, slices -> a template
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.base.files import to_json, write_text_atomically
from sbkit.evaluate.calibration import Bin, reliability_bins
from sbkit.evaluate.run_results import RunResults
from sbkit.evaluate.wer import Scored, WordPairs, have_words, mark_pair
from sbkit.evaluate.wer_report import judge_words
from sbkit.logs.curves import encode_panel, overlay, run_panels
from sbkit.logs.metric import Metric, Metrics
from sbkit.logs.page import render_page
from sbkit.text.word import Word

REPORT = "report.html"
CLIPS = 200  # that can be played
LONGEST = 30.0  # seconds of a clip that can be played
ALL_BYTES, ROW_BYTES = 5_600_000, 700_000  # of rows with their clips, and without; a page has 6 MB
MOST = 20  # frequent errors of each kind
SLICES = 200  # values of a column: 10,000 speakers would take 6 MB
ERROR_RATES: Metrics = {"WER": Metric(), "CER": Metric()}

Clips = Callable[[str, list[str], int], Mapping[str, str]]
"""Given a test set, ids and the bytes that they may take, return MP3 in base64 by id."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The words that a recognizer has seen written, and where."""

    words: Container[str]
    source: str


@dataclass(frozen=True, kw_only=True)
class Compared:
    """An utterance as each run recognized it; pairs: its aligned words, for each run.

    Of a language that writes no spaces between words, these are its characters.
    """

    runs: tuple[Scored, ...]
    pairs: tuple[WordPairs, ...]

    @property
    def id(self) -> str:
        """Return its id, which is the same for all."""
        return self.runs[0].id

    @property
    def errors(self) -> int:
        """Count the errors of all runs."""
        return sum(each.errors.errors for each in self.runs)


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A word, what was recognized instead, and how often by each run.

    One of the two is "": of a word that was inserted, or deleted.
    """

    reference: str
    hypothesis: str
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnknownWord:
    """A word of the references that the recognizer has never seen written.

    count: of its occurrences; right: of those recognized; instead: words recognized in its place,
    the most frequent first.
    """

    word: str
    count: int
    right: int
    instead: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page shows of a test set beside its table; of a classifier nothing but slices.

    played: how many of the ``shown`` utterances can be played, of ``utterances`` in all.
    """

    name: str
    utterances: int
    shown: int
    played: int
    errors: tuple[Confusion, ...]
    unknown: tuple[UnknownWord, ...] | None
    reliability: tuple[tuple[Bin, ...], ...]

    @property
    def calibrated(self) -> bool:
        """Return whether words have confidences."""
        return any(self.reliability)

    @property
    def substituted(self) -> list[Confusion]:
        """Return the words for which others were recognized."""
        return [each for each in self.errors if each.reference and each.hypothesis][:MOST]

    @property
    def deleted(self) -> list[Confusion]:
        """Return the words that were not recognized."""
        return [each for each in self.errors if not each.hypothesis][:MOST]

    @property
    def inserted(self) -> list[Confusion]:
        """Return the recognized words that are not in the reference."""
        return [each for each in self.errors if not each.reference][:MOST]


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The figures of some values of a column, for each run; ``values`` counts all of them."""

    column: str
    values: int
    rows: list[tuple[str, list[Mapping[str, Any]]]]


def write_report(
    file: Path,
    runs: Sequence[RunResults],
    *,
    clips: Clips,
    metrics: Metrics = ERROR_RATES,
    known: Known | None = None,
    notes: Sequence[str] = (),
    compared: Mapping[str, Any] | None = None,
) -> None:
    """Write the page of one run, or of two with the figures of their differences, ``compared``.

    Two runs must have the same references (`sbkit/evaluate/compare.py`). ``notes`` are lines below
    the title. The same input gives the same bytes.
    """
    names = [name for name in runs[0].test if all(name in each.test for each in runs)]
    with_text = [name for name in names if all(name in each.utterances for each in runs)]
    by_words = all(have_words(each.utterances[name]) for each in runs for name in with_text)
    known = known if by_words else None
    sections, tables = list[Section](), dict[str, list[dict[str, Any]]]()
    for name in with_text:
        section, tables[name] = _section(name, runs, clips, known, share=len(with_text))
        sections.append(section)
    content = render_page(
        title=" and ".join(each.name for each in runs),
        notes=notes,
        runs=[*zip(("A", "B"), runs, strict=False)],
        names=names,
        sections=sections,
        slices={name: [*_slices(name, runs)] for name in names},
        metrics={name: each for name, each in metrics.items() if _all_have(name, runs, names)},
        unit="word" if by_words else "character",
        panels=_panels(runs, metrics),
        known=known,
        compared=compared,
        facts=runs[0].data,
        data={"sets": tables, "runs": len(runs), "byWords": by_words},
    )
    write_text_atomically(file, content)


def _all_have(metric: str, runs: Sequence[RunResults], names: Sequence[str]) -> bool:
    return all(metric in each.test[name] for each in runs for name in names)


def _section(
    name: str, runs: Sequence[RunResults], clips: Clips, known: Known | None, *, share: int
) -> tuple[Section, list[dict[str, Any]]]:
    """Return what is shown of a test set, and its rows, in a ``share``-th of the page's bytes."""
    utterances = compare_utterances([each.utterances[name] for each in runs])
    ordered = choose(utterances)
    sizes = [*accumulate(len(to_json(row(each, {})).encode()) for each in ordered)]
    chosen = ordered[: bisect_right(sizes, ROW_BYTES // share)]
    left = ALL_BYTES // share - sum(sizes[len(chosen) - 1 : len(chosen)])
    found = clips(name, [each.id for each in chosen[: CLIPS // share]], left)
    section = Section(
        name=name,
        utterances=len(utterances),
        shown=len(chosen),
        played=len(found),
        errors=confusions([[each.pairs[run] for each in utterances] for run in range(len(runs))]),
        unknown=unknown_words([each.pairs[0] for each in utterances], known.words)
        if known
        else None,
        reliability=tuple(reliability_bins(*judge_words(each.utterances[name])) for each in runs),
    )
    return section, [row(each, found) for each in sorted(chosen, key=lambda each: each.id)]


def _panels(runs: Sequence[RunResults], metrics: Metrics) -> list[tuple[str, str]]:
    """Return what the curves show and their pictures, none where nothing was trained."""
    drawn = [run_panels(each.log, metrics) for each in runs if each.log]
    if len(drawn) > 1:
        drawn = [tuple(overlay(*both) for both in zip(*drawn, strict=True))]
    return [
        (f"{panel.title}: {'; '.join(each.label for each in panel.curves)}", encode_panel(panel))
        for panels in drawn
        for panel in panels
    ]


def _slices(name: str, runs: Sequence[RunResults]) -> Iterator[Slices]:
    """Yield the figures of each column that all runs are reported by."""
    reported = [each.test[name].get("report_by") or {} for each in runs]
    for column, values in reported[0].items():
        shared = [
            value for value in values if all(value in each.get(column, {}) for each in reported)
        ]
        largest = nlargest(SLICES, shared, key=lambda value: values[value]["utterances"])
        rows = [(value, [each[column][value] for each in reported]) for value in sorted(largest)]
        if rows:
            yield Slices(column=column, values=len(shared), rows=rows)


def compare_utterances(runs: Sequence[Iterable[Scored]]) -> list[Compared]:
    """Put the same utterances of each run together, in the order of their ids."""
    ordered = [sorted(each, key=lambda one: (one.id, one.reference)) for each in runs]
    return [
        Compared(runs=same, pairs=tuple(each.pairs for each in same))
        for same in zip(*ordered, strict=True)
    ]


def choose(utterances: Sequence[Compared]) -> list[Compared]:
    """Return them in the order of their use for a report: in turn the worst left, and one drawn.

    The same utterances give the same order.
    """
    worst_first = sorted(utterances, key=lambda each: (-each.errors, each.id))
    drawn = iter(np.random.default_rng(0).permutation(len(worst_first)).tolist())
    by_turns = (place for pair in zip(count(), drawn, strict=False) for place in pair)
    return [worst_first[place] for place in dict.fromkeys(by_turns)]


def row(utterance: Compared, clips: Mapping[str, str]) -> dict[str, Any]:
    """Return an utterance as plain data; ``clips`` are MP3 in base64, by id."""
    first = utterance.runs[0]
    sides = zip(utterance.runs, utterance.pairs, strict=True)
    return {
        "id": first.id,
        "reference": first.reference,
        "words": first.scores.words.total,
        "characters": first.scores.characters.total,
        "seconds": first.seconds,
        "speaker": first.speaker,
        "clip": clips.get(first.id),
        "runs": [_side(scored, pairs) for scored, pairs in sides],
    }


def _side(scored: Scored, pairs: WordPairs) -> dict[str, Any]:
    """Return a hypothesis; ``marks`` has S, D, I or, of a right word, = for each pair of words."""
    timed = [each.text for each in scored.words] == scored.hypothesis.split()
    return {
        "hypothesis": scored.hypothesis,
        "marks": "".join(mark_pair(*pair) or "=" for pair in pairs),
        "errors": scored.errors.errors,
        "character_errors": scored.scores.characters.errors,
        "heard": [_time(each) for each in scored.words] if timed else None,
    }


def _time(word: Word) -> list[float | None]:
    confidence = None if word.confidence is None else round(word.confidence, 3)
    return [round(word.start, 3), round(word.end, 3), confidence]


def confusions(runs: Sequence[Iterable[WordPairs]]) -> tuple[Confusion, ...]:
    """Return the errors of one run or several, the most frequent first."""
    counted = [
        Counter(pair for pairs in utterances for pair in pairs if pair[0] != pair[1])
        for utterances in runs
    ]
    together = sum(counted, Counter[tuple[str, str]]())
    ranked = sorted(together, key=lambda pair: (-together[pair], pair))
    return tuple(
        Confusion(
            reference=reference,
            hypothesis=hypothesis,
            counts=tuple(each[reference, hypothesis] for each in counted),
        )
        for reference, hypothesis in ranked
    )


def unknown_words(
    utterances: Iterable[WordPairs], known: Container[str]
) -> tuple[UnknownWord, ...]:
    """Return the words of the references that are not known, the most frequent first."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for pairs in utterances:
        for word, recognized in pairs:
            if word and word not in known:
                found[word][recognized] += 1
    words = (
        UnknownWord(
            word=word,
            count=counts.total(),
            right=counts[word],
            instead=tuple(other for other, _ in counts.most_common() if other not in (word, "")),
        )
        for word, counts in found.items()
    )
    return tuple(sorted(words, key=lambda each: (-each.count, each.word)))
