"""``report.html``: the results of a run as one self-contained page.

results -> for each test set the utterances to show, frequent errors, slices -> a template
"""

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate, chain, takewhile
from pathlib import Path

import numpy as np

from sbkit.base.files import to_json, write_text_atomically
from sbkit.evaluate.calibration import measure_calibration, reliability_bins
from sbkit.evaluate.wer import FigureDict, ScoredUtterance, all_have_word_boundaries, mark_pair
from sbkit.evaluate.wer_report import word_confidences
from sbkit.logs.html_page import render_page
from sbkit.logs.metric import Metrics

REPORT = "report.html"
MAX_CLIPS = 200
MAX_HEARD_SECONDS = 30.0
# The rows of utterances, with clips and without; a page then has at most 6 MB.
MAX_BYTES, MAX_ROW_BYTES = 5_600_000, 700_000
MAX_FREQUENT_ERRORS = 20  # of each kind
MAX_SLICES = 200  # values of a column: 10,000 speakers would take 6 MB

ClipLoader = Callable[[str, list[str], int], Mapping[str, str]]
"""Given a test set, ids and a limit in bytes, return MP3 in base64 by id."""


def write_report(
    file: Path | str,
    *,
    title: str,
    test: Mapping[str, FigureDict],
    utterances: Mapping[str, Sequence[ScoredUtterance]],
    clips: ClipLoader,
    metrics: Metrics,
    notes: Sequence[str] = (),
    pictures: Iterable[Path | str] = (),
    data: FigureDict | None = None,
) -> None:
    """Write the page of a run. The same input gives the same bytes.

    test: the figures of each test set, as in `summary.json`.
    utterances: of each test set of a recognizer.
    notes: lines below the title.
    pictures: PNGs, each shown with the MP3s beside it, which are named `PICTURE.LABEL.mp3`.
    data: the figures of the data report.
    """
    with_text = [name for name in test if name in utterances]
    by_words = all(all_have_word_boundaries(utterances[name]) for name in with_text)
    count = len(with_text)
    sections = {name: _section(name, utterances[name], clips, num_sets=count) for name in with_text}
    content = render_page(
        title=title,
        notes=notes,
        test=test,
        sections=[section for section, _ in sections.values()],
        slices={name: [*_slices(figures.get("report_by") or {})] for name, figures in test.items()},
        metrics={
            name: metric
            for name, metric in metrics.items()
            if all(name in figures for figures in test.values())
        },
        unit="word" if by_words else "character",
        pictures={
            picture.stem: (_encode(picture), _sounds(picture)) for picture in map(Path, pictures)
        },
        facts=data,
        data={"sets": {name: rows for name, (_, rows) in sections.items()}, "byWords": by_words},
    )
    write_text_atomically(Path(file), content)


def _encode(file: Path) -> str:
    return b64encode(file.read_bytes()).decode()


def _sounds(picture: Path) -> dict[str, str]:
    sounds = sorted(picture.parent.glob(f"{picture.stem}.*.mp3"))
    return {file.stem.removeprefix(f"{picture.stem}."): _encode(file) for file in sounds}


def _section(
    name: str, utterances: Sequence[ScoredUtterance], clips: ClipLoader, *, num_sets: int
) -> tuple[FigureDict, list[FigureDict]]:
    """Return the section of a test set and its rows; ``num_sets`` test sets share the page."""
    utterances = sorted(utterances, key=lambda utterance: utterance.key)
    utterances_by_use = order_by_use(utterances)
    ends = accumulate(len(to_json(row(utterance, {})).encode()) for utterance in utterances_by_use)
    shown_ends = [0, *takewhile(lambda end: end <= MAX_ROW_BYTES // num_sets, ends)]
    shown_utterances = utterances_by_use[: len(shown_ends) - 1]
    clip_bytes = MAX_BYTES // num_sets - shown_ends[-1]
    ids = [utterance.id for utterance in shown_utterances[: MAX_CLIPS // num_sets]]
    clip_of_id = clips(name, ids, clip_bytes)
    pairs = Counter(chain.from_iterable(utterance.aligned_units for utterance in utterances))
    confidences = word_confidences(utterances)
    section = {
        "name": name,
        "utterances": len(utterances),
        "shown": len(shown_utterances),
        "played": len(clip_of_id),
        "errors": confusions(pairs),
        "reliability": reliability_bins(*confidences),
        "calibration": measure_calibration(*confidences),
    }
    by_id = sorted(shown_utterances, key=lambda utterance: utterance.id)
    return section, [row(utterance, clip_of_id) for utterance in by_id]


def _slices(slices: Mapping[str, Mapping[str, FigureDict]]) -> Iterator[FigureDict]:
    """Yield the largest slices of each column; `all` is the number of its values."""
    for column, by_value in slices.items():
        largest = nlargest(MAX_SLICES, by_value, key=lambda v: by_value[v]["utterances"])
        rows = [(value, by_value[value]) for value in sorted(largest)]
        yield {"column": column, "all": len(by_value), "rows": rows}


def order_by_use(utterances: Sequence[ScoredUtterance]) -> list[ScoredUtterance]:
    """Order utterances for a report: alternately the worst and a random one, always the same."""
    worst_first = sorted(utterances, key=lambda utterance: (-utterance.counts.errors, utterance.id))
    random_order = np.random.default_rng(0).permutation(len(worst_first)).tolist()
    alternating = chain.from_iterable(enumerate(random_order))
    return [worst_first[index] for index in dict.fromkeys(alternating)]


def row(utterance: ScoredUtterance, clips: Mapping[str, str]) -> FigureDict:
    """Return an utterance as plain data; ``marks``: S, D, I or = (right) for each word pair."""
    greedy = None if utterance.greedy is None else utterance.greedy.hypothesis
    is_timed = [word.text for word in utterance.words] == utterance.hypothesis.split()
    times = [
        [round(word.start, 3), round(word.end, 3), word.confidence] for word in utterance.words
    ]
    return {
        "id": utterance.id,
        "reference": utterance.reference,
        "hypothesis": utterance.hypothesis,
        "greedy": None if greedy == utterance.hypothesis else greedy,
        "marks": "".join(mark_pair(*pair) or "=" for pair in utterance.aligned_units),
        "errors": utterance.counts.errors,
        "character_errors": utterance.errors.characters.errors,
        "words": utterance.errors.words.reference_length,
        "characters": utterance.errors.characters.reference_length,
        "seconds": utterance.seconds,
        "speaker": utterance.speaker,
        "heard": times if is_timed else None,
        "clip": clips.get(utterance.id),
    }


def confusions(pairs: Counter[tuple[str, str]]) -> dict[str, list[FigureDict]]:
    """Return the most frequent errors by kind, given how often words are aligned."""
    errors: dict[str, list[FigureDict]] = {"Substituted": [], "Deleted": [], "Inserted": []}
    wrong_pairs = (pair for pair in pairs if pair[0] != pair[1])
    for pair in sorted(wrong_pairs, key=lambda pair: (-pairs[pair], pair)):
        reference, hypothesis = pair
        kind = "Inserted" if not reference else "Substituted" if hypothesis else "Deleted"
        error = {"reference": reference, "hypothesis": hypothesis, "count": pairs[pair]}
        errors[kind].append(error)
    return {kind: rows[:MAX_FREQUENT_ERRORS] for kind, rows in errors.items()}
