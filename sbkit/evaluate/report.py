"""``report.html``: the results of a run, or of two side by side, as one self-contained page.

results -> for each test set the utterances to show, frequent errors, slices -> a template
"""

from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate, chain, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sbkit.base.files import to_json, write_text_atomically
from sbkit.evaluate.calibration import measure_calibration, reliability_bins
from sbkit.evaluate.run_results import RunResults
from sbkit.evaluate.wer import (
    FigureDict,
    ScoredUtterance,
    all_have_word_boundaries,
    mark_pair,
)
from sbkit.evaluate.wer_report import word_confidences
from sbkit.logs.curves import encode_curves
from sbkit.logs.html_page import render_page
from sbkit.logs.metric import Metric, Metrics

REPORT = "report.html"
MAX_CLIPS = 200
MAX_CLIP_SECONDS = 30.0
# The rows of utterances, with clips and without; a page then has at most 6 MB.
MAX_BYTES, MAX_ROW_BYTES = 5_600_000, 700_000
MAX_FREQUENT_ERRORS = 20  # of each kind
MAX_SLICES = 200  # values of a column: 10,000 speakers would take 6 MB
ERROR_RATES: Metrics = {"WER": Metric(), "CER": Metric()}

Clips = Callable[[str, list[str], int], Mapping[str, str]]
"""Given a test set, ids and a limit in bytes, return MP3 in base64 by id."""

UtteranceOfRuns = tuple[ScoredUtterance, ...]  # an utterance as each run recognized it
PairCounts = Counter[tuple[str, str]]  # how often a word and its counterpart are aligned


class KnownWords(NamedTuple):
    """The words that a recognizer has seen in text, and the source of that text."""

    words: Container[str]
    source: str


def write_report(
    file: Path | str,
    runs: Sequence[RunResults],
    *,
    clips: Clips,
    metrics: Metrics = ERROR_RATES,
    known_words: KnownWords | None = None,
    notes: Sequence[str] = (),
    pictures: Iterable[Path | str] = (),
    compared: FigureDict | None = None,
) -> None:
    """Write the page of one run, or of two. The same input gives the same bytes.

    Args:
        file: the page.
        runs: as `sbkit.evaluate.run_results.read_results` returns them; two runs must have the
            same references (`sbkit/evaluate/compare.py`).
        clips: returns clips to play.
        metrics: of the recipe, in the order of the table.
        known_words: the page lists the words of the references that are not among them.
        notes: lines below the title.
        pictures: PNGs, each shown with the MP3s beside it, which are named `PICTURE.LABEL.mp3`.
        compared: the comparison of each test set of two runs.
    """
    names = [name for name in runs[0].test if all(name in run.test for run in runs)]
    with_text = [name for name in names if all(name in run.utterances for run in runs)]
    by_words = all(
        all_have_word_boundaries(run.utterances[name]) for run in runs for name in with_text
    )
    known_words = known_words if by_words else None
    figures = [run.test[name] for run in runs for name in names]
    num_sets = len(with_text)
    sections = {name: _section(name, runs, clips, known_words, num_sets) for name in with_text}
    content = render_page(
        title=" and ".join(run.name for run in runs),
        notes=notes,
        runs=[*zip(("A", "B"), runs, strict=False)],
        names=names,
        sections=[section for section, _ in sections.values()],
        slices={name: [*_slices(name, runs)] for name in names},
        metrics={
            name: metric for name, metric in metrics.items() if all(name in row for row in figures)
        },
        unit="word" if by_words else "character",
        curves=encode_curves([run.log for run in runs], metrics),
        pictures={
            picture.stem: (_encode(picture), _sounds(picture)) for picture in map(Path, pictures)
        },
        known=known_words,
        compared=compared,
        facts=runs[0].data,
        data={
            "sets": {name: rows for name, (_, rows) in sections.items()},
            "runs": len(runs),
            "byWords": by_words,
        },
    )
    write_text_atomically(Path(file), content)


def _encode(file: Path) -> str:
    return b64encode(file.read_bytes()).decode()


def _sounds(picture: Path) -> dict[str, str]:
    sounds = sorted(picture.parent.glob(f"{picture.stem}.*.mp3"))
    return {file.stem.removeprefix(f"{picture.stem}."): _encode(file) for file in sounds}


def _section(
    name: str,
    runs: Sequence[RunResults],
    clips: Clips,
    known_words: KnownWords | None,
    num_sets: int,
) -> tuple[FigureDict, list[FigureDict]]:
    """Return the section of a test set and its rows; ``num_sets`` test sets share the page."""
    utterances = join_utterances([run.utterances[name] for run in runs])
    ordered = order_by_use(utterances)
    ends = accumulate(len(to_json(row(utterance, {})).encode()) for utterance in ordered)
    shown_ends = [0, *takewhile(lambda end: end <= MAX_ROW_BYTES // num_sets, ends)]
    shown_utterances = ordered[: len(shown_ends) - 1]
    clip_bytes = MAX_BYTES // num_sets - shown_ends[-1]
    ids = [utterance[0].id for utterance in shown_utterances[: MAX_CLIPS // num_sets]]
    clip_of_id = clips(name, ids, clip_bytes)
    results = [*zip(*utterances, strict=True)]  # of each run
    pairs = [Counter(chain.from_iterable(u.aligned_units for u in of_run)) for of_run in results]
    judged = [word_confidences(of_run) for of_run in results]
    reliability = [reliability_bins(*words) for words in judged]
    section = {
        "name": name,
        "utterances": len(utterances),
        "shown": len(shown_utterances),
        "played": len(clip_of_id),
        "errors": confusions(pairs),
        "unknown": unknown_words(pairs[0], known_words.words) if known_words and pairs else [],
        "reliability": reliability,
        "calibration": [measure_calibration(*words) for words in judged],
        "calibrated": any(reliability),
    }
    by_id = sorted(shown_utterances, key=lambda utterance: utterance[0].id)
    return section, [row(utterance, clip_of_id) for utterance in by_id]


def _slices(name: str, runs: Sequence[RunResults]) -> Iterator[FigureDict]:
    """Yield the slices of each column that all runs have; `all` is the number of its values."""
    slices = [run.test[name].get("report_by") or {} for run in runs]
    for column, first_figures in slices[0].items():
        figures = [by_column.get(column, {}) for by_column in slices]  # of each run, by value
        common = [
            value for value in first_figures if all(value in by_value for by_value in figures)
        ]
        largest = nlargest(MAX_SLICES, common, key=lambda v: first_figures[v]["utterances"])
        rows = [(value, [by_value[value] for by_value in figures]) for value in sorted(largest)]
        if rows:
            yield {"column": column, "all": len(common), "rows": rows}


def join_utterances(runs: Sequence[Iterable[ScoredUtterance]]) -> list[UtteranceOfRuns]:
    """Join the results of all runs for each utterance, in the order of the ids."""
    ordered = [sorted(run, key=lambda utterance: utterance.key) for run in runs]
    return list(zip(*ordered, strict=True))


def order_by_use(utterances: Sequence[UtteranceOfRuns]) -> list[UtteranceOfRuns]:
    """Order utterances for a report: alternately the worst and a random one, always the same."""

    def rank(runs: UtteranceOfRuns) -> tuple[int, str]:
        return -sum(result.counts.errors for result in runs), runs[0].id

    worst_first = sorted(utterances, key=rank)
    drawn = np.random.default_rng(0).permutation(len(worst_first)).tolist()
    alternating = chain.from_iterable(enumerate(drawn))
    return [worst_first[index] for index in dict.fromkeys(alternating)]


def row(utterance: UtteranceOfRuns, clips: Mapping[str, str]) -> FigureDict:
    """Return an utterance as plain data; ``clips``: MP3 in base64 by id."""
    first = utterance[0]
    return {
        "id": first.id,
        "reference": first.reference,
        "words": first.errors.words.reference_length,
        "characters": first.errors.characters.reference_length,
        "seconds": first.seconds,
        "speaker": first.speaker,
        "clip": clips.get(first.id),
        "runs": [*map(_side, utterance)],
    }


def _side(scored: ScoredUtterance) -> FigureDict:
    """Return one run's result as plain data; ``marks``: S, D, I or = (right) for each word pair."""
    is_timed = [word.text for word in scored.words] == scored.hypothesis.split()
    times = [[round(word.start, 3), round(word.end, 3), word.confidence] for word in scored.words]
    return {
        "hypothesis": scored.hypothesis,
        "marks": "".join(mark_pair(*pair) or "=" for pair in scored.aligned_units),
        "errors": scored.counts.errors,
        "character_errors": scored.errors.characters.errors,
        "heard": times if is_timed else None,
    }


def confusions(runs: Sequence[PairCounts]) -> dict[str, list[FigureDict]]:
    """Return the most frequent errors by kind, with the count of each run.

    The reference of an inserted word is "", and so is the hypothesis of a deleted one.
    """
    totals = sum(runs, PairCounts())
    errors: dict[str, list[FigureDict]] = {"Substituted": [], "Deleted": [], "Inserted": []}
    wrong = (pair for pair in totals if pair[0] != pair[1])
    for pair in sorted(wrong, key=lambda pair: (-totals[pair], pair)):
        reference, hypothesis = pair
        kind = "Inserted" if not reference else "Substituted" if hypothesis else "Deleted"
        counts = [counter[pair] for counter in runs]
        errors[kind].append({"reference": reference, "hypothesis": hypothesis, "counts": counts})
    return {kind: rows[:MAX_FREQUENT_ERRORS] for kind, rows in errors.items()}


def unknown_words(pairs: PairCounts, vocabulary: Container[str]) -> list[FigureDict]:
    """Return the unknown words of the references, the most frequent first.

    Each has its count, the number of times it was right, and the words recognized instead.
    """
    recognized_as: dict[str, Counter[str]] = defaultdict(Counter)
    for (word, recognized), count in pairs.items():
        if word and word not in vocabulary:
            recognized_as[word][recognized] = count
    rows = [
        {
            "word": word,
            "count": counts.total(),
            "right": counts[word],
            "instead": [other for other, _ in counts.most_common() if other not in (word, "")],
        }
        for word, counts in recognized_as.items()
    ]
    return sorted(rows, key=lambda row: (-row["count"], row["word"]))
