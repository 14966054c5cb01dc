"""``report.html``: the results of a run, or of two side by side, as one page to be mailed.

results -> for each test set the chosen utterances, frequent errors, slices -> a template
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from sbkit.base.files import write_text_atomically
from sbkit.evaluate.calibration import Bin, reliability_bins
from sbkit.evaluate.report_rows import (
    Compared,
    Confusion,
    UnknownWord,
    choose,
    compare_utterances,
    confusions,
    row,
    row_sizes,
    unknown_words,
)
from sbkit.evaluate.run_results import RunResults
from sbkit.evaluate.wer import have_words
from sbkit.evaluate.wer_report import judge_words
from sbkit.logs.curves import encode_panel, overlay, run_panels
from sbkit.logs.metric import Metric, Metrics
from sbkit.logs.page import render_page

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
    sizes = row_sizes(ordered)
    chosen = ordered[: bisect_right(sizes, ROW_BYTES // share)]
    left = ALL_BYTES // share - sum(sizes[len(chosen) - 1 : len(chosen)])
    found = clips(name, [each.id for each in chosen[: CLIPS // share]], left)
    section = Section(
        name=name,
        utterances=len(utterances),
        shown=len(chosen),
        played=len(found),
        errors=confusions([[each.pairs[run] for each in utterances] for run in range(len(runs))]),
        unknown=_unknown(utterances, known),
        reliability=tuple(reliability_bins(*judge_words(each.utterances[name])) for each in runs),
    )
    return section, [row(each, found) for each in sorted(chosen, key=lambda each: each.id)]


def _unknown(utterances: Sequence[Compared], known: Known | None) -> tuple[UnknownWord, ...] | None:
    if known is None:
        return None
    return unknown_words([each.pairs[0] for each in utterances], known.words)


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
