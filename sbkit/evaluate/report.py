"""``report.html``: the results of a run, or of two side by side, as one page to be mailed.

results -> for each test set the chosen utterances, frequent errors, slices -> a template
"""

from base64 import b64encode
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.base.files import to_json, write_text_atomically
from sbkit.evaluate.calibration import measure_calibration, reliability_bins
from sbkit.evaluate.run_results import RunResults
from sbkit.evaluate.wer import ScoredUtterance, WordPairs, have_words, mark_pair
from sbkit.evaluate.wer_report import judge_words
from sbkit.logs.curves import encode_curves, render_page
from sbkit.logs.metric import Metric, Metrics
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

Compared = tuple[ScoredUtterance, ...]  # an utterance as each run recognized it


class Known(NamedTuple):
    """The words that a recognizer has seen written, and where."""

    words: Container[str]
    source: str


def write_report(
    file: Path,
    runs: Sequence[RunResults],
    *,
    clips: Clips,
    metrics: Metrics = ERROR_RATES,
    known: Known | None = None,
    notes: Sequence[str] = (),
    pictures: Iterable[Path] = (),
    compared: Mapping[str, Any] | None = None,
) -> None:
    """Write the page of one run, or of two with the figures of their differences, ``compared``.

    Two runs must have the same references (`sbkit/evaluate/compare.py`). ``notes`` are lines below
    the title, ``pictures`` PNGs that the recipe drew, each shown with the MP3s beside it, which
    are named `PICTURE.WHAT.mp3`. The same input gives the same bytes.
    """
    names = [name for name in runs[0].test if all(name in each.test for each in runs)]
    with_text = [name for name in names if all(name in each.utterances for each in runs)]
    by_words = all(have_words(each.utterances[name]) for each in runs for name in with_text)
    known = known if by_words else None
    sections, tables = list[dict[str, Any]](), dict[str, list[dict[str, Any]]]()
    for name in with_text:
        section, tables[name] = _section(name, runs, clips, known, share=len(with_text))
        sections.append(section)
    measured = [each.test[name] for each in runs for name in names]
    content = render_page(
        title=" and ".join(each.name for each in runs),
        notes=notes,
        runs=[*zip(("A", "B"), runs, strict=False)],
        names=names,
        sections=sections,
        slices={name: [*_slices(name, runs)] for name in names},
        metrics={name: each for name, each in metrics.items() if all(name in m for m in measured)},
        unit="word" if by_words else "character",
        curves=encode_curves([each.log for each in runs], metrics),
        pictures={each.stem: (_encoded(each), _sounds(each)) for each in pictures},
        known=known,
        compared=compared,
        facts=runs[0].data,
        data={"sets": tables, "runs": len(runs), "byWords": by_words},
    )
    write_text_atomically(file, content)


def _encoded(file: Path) -> str:
    return b64encode(file.read_bytes()).decode()


def _sounds(picture: Path) -> dict[str, str]:
    """Return the MP3s of a picture by what they are."""
    sounds = sorted(picture.parent.glob(f"{picture.stem}.*.mp3"))
    return {each.stem.removeprefix(f"{picture.stem}."): _encoded(each) for each in sounds}


def _section(
    name: str, runs: Sequence[RunResults], clips: Clips, known: Known | None, *, share: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what is shown of a test set, and its rows, in a ``share``-th of the page's bytes."""
    utterances = compare_utterances([each.utterances[name] for each in runs])
    ordered = choose(utterances)
    sizes = [*accumulate(len(to_json(row(each, {})).encode()) for each in ordered)]
    chosen = ordered[: bisect_right(sizes, ROW_BYTES // share)]
    left = ALL_BYTES // share - sum(sizes[len(chosen) - 1 : len(chosen)])
    found = clips(name, [each[0].id for each in chosen[: CLIPS // share]], left)
    pairs = [[each.pairs for each in run] for run in zip(*utterances, strict=True)]
    judged = [judge_words(each.utterances[name]) for each in runs]
    reliability = [reliability_bins(*each) for each in judged]
    section = {
        "name": name,
        "utterances": len(utterances),
        "shown": len(chosen),
        "played": len(found),
        "errors": confusions(pairs),
        "unknown": unknown_words(pairs[0], known.words) if known and pairs else [],
        "reliability": reliability,
        "calibration": [measure_calibration(*each) for each in judged],
        "calibrated": any(reliability),
    }
    return section, [row(each, found) for each in sorted(chosen, key=lambda each: each[0].id)]


def _slices(name: str, runs: Sequence[RunResults]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each column that all runs are reported by; `all` counts its values."""
    reported = [each.test[name].get("report_by") or {} for each in runs]
    for column, values in reported[0].items():
        shared = [
            value for value in values if all(value in each.get(column, {}) for each in reported)
        ]
        largest = nlargest(SLICES, shared, key=lambda value: values[value]["utterances"])
        rows = [(value, [each[column][value] for each in reported]) for value in sorted(largest)]
        if rows:
            yield {"column": column, "all": len(shared), "rows": rows}


def compare_utterances(runs: Sequence[Iterable[ScoredUtterance]]) -> list[Compared]:
    """Put the same utterances of each run together, in the order of their ids."""
    ordered = [sorted(each, key=lambda one: (one.id, one.reference)) for each in runs]
    return list(zip(*ordered, strict=True))


def choose(utterances: Sequence[Compared]) -> list[Compared]:
    """Return them in the order of their use for a report: in turn the worst left, and one drawn.

    The same utterances give the same order.
    """
    worst_first = sorted(
        utterances, key=lambda each: (-sum(one.errors.errors for one in each), each[0].id)
    )
    drawn = iter(np.random.default_rng(0).permutation(len(worst_first)).tolist())
    by_turns = (place for pair in zip(count(), drawn, strict=False) for place in pair)
    return [worst_first[place] for place in dict.fromkeys(by_turns)]


def row(utterance: Compared, clips: Mapping[str, str]) -> dict[str, Any]:
    """Return an utterance as plain data; ``clips`` are MP3 in base64, by id."""
    first = utterance[0]
    return {
        "id": first.id,
        "reference": first.reference,
        "words": first.scores.words.total,
        "characters": first.scores.characters.total,
        "seconds": first.seconds,
        "speaker": first.speaker,
        "clip": clips.get(first.id),
        "runs": [_side(each) for each in utterance],
    }


def _side(scored: ScoredUtterance) -> dict[str, Any]:
    """Return a hypothesis; ``marks`` has S, D, I or, of a right word, = for each pair of words."""
    timed = [each.text for each in scored.words] == scored.hypothesis.split()
    return {
        "hypothesis": scored.hypothesis,
        "marks": "".join(mark_pair(*pair) or "=" for pair in scored.pairs),
        "errors": scored.errors.errors,
        "character_errors": scored.scores.characters.errors,
        "heard": [_time(each) for each in scored.words] if timed else None,
    }


def _time(word: Word) -> list[float | None]:
    confidence = None if word.confidence is None else round(word.confidence, 3)
    return [round(word.start, 3), round(word.end, 3), confidence]


def confusions(runs: Sequence[Iterable[WordPairs]]) -> dict[str, list[dict[str, Any]]]:
    """Return the most frequent errors of one run or several, by kind, with the counts of each.

    Of a word that was inserted the reference is "", of a deleted one the hypothesis.
    """
    counted = [
        Counter(pair for pairs in utterances for pair in pairs if pair[0] != pair[1])
        for utterances in runs
    ]
    together = sum(counted, Counter[tuple[str, str]]())
    kinds: dict[str, list[dict[str, Any]]] = {"Substituted": [], "Deleted": [], "Inserted": []}
    for pair in sorted(together, key=lambda pair: (-together[pair], pair)):
        kind = {"S": "Substituted", "D": "Deleted", "I": "Inserted"}[mark_pair(*pair)]
        both = dict(zip(("reference", "hypothesis"), pair, strict=True))
        kinds[kind].append({**both, "counts": [each[pair] for each in counted]})
    return {kind: each[:MOST] for kind, each in kinds.items()}


def unknown_words(utterances: Iterable[WordPairs], known: Container[str]) -> list[dict[str, Any]]:
    """Return the words of the references that are not known, the most frequent first.

    Of each how often it occurs, how often it is right, and what was recognized in its place.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for pairs in utterances:
        for word, recognized in pairs:
            if word and word not in known:
                found[word][recognized] += 1
    return [
        {
            "word": word,
            "count": counts.total(),
            "right": counts[word],
            "instead": [other for other, _ in counts.most_common() if other not in (word, "")],
        }
        for word, counts in sorted(found.items(), key=lambda each: (-each[1].total(), each[0]))
    ]
