"""A report of every utterance of a split with its word errors, and the figures of the whole."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sbkit.base.files import write_text_atomically
from sbkit.text.interval import Interval, rate_interval
from sbkit.text.wer import ErrorCounts, Scored, Scores, align, total_scores


def write_wer(path: Path, scored: Iterable[Scored]) -> None:
    """Write every utterance with its aligned errors, the worst first, below the totals."""
    worst_first = sorted(scored, key=_badness)
    head = _describe_scores(total_scores(worst_first))
    bodies = map(_describe_utterance, worst_first)
    write_text_atomically(path, "\n".join([head, *bodies]))


def _badness(utterance: Scored) -> tuple[int, float, str]:
    words = utterance.scores.words
    return (-words.errors, -words.rate, utterance.id)


def _describe_scores(scores: Scores) -> str:
    return (
        f"WER {_describe_counts(scores.words, 'words')}\n"
        f"CER {_describe_counts(scores.characters, 'characters')}\n\n"
        f"Utterances: {scores.utterances}, the worst first. "
        "S: substituted, D: deleted, I: inserted, *: no counterpart.\n"
    )


def _describe_counts(counts: ErrorCounts, unit: str) -> str:
    return (
        f"{_percent(counts.rate)} ({counts.errors} errors / {counts.total} {unit}: "
        f"{counts.substitutions} S, {counts.deletions} D, {counts.insertions} I)"
    )


def _describe_utterance(utterance: Scored) -> str:
    words, characters = utterance.scores.words, utterance.scores.characters
    lines = align(utterance.reference, utterance.hypothesis)
    return (
        f"{utterance.id}: WER {_percent(words.rate)} ({words.errors} / {words.total}), "
        f"CER {_percent(characters.rate)} ({characters.errors} / {characters.total})\n"
        + _label("reference", lines.reference)
        + _label("hypothesis", lines.hypothesis)
        + (_label("", lines.marks) if lines.marks else "")
    )


def _label(name: str, line: str) -> str:
    return f"  {name:<10}  {line}".rstrip() + "\n"


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f} %"


def describe_rates(test: Scores) -> str:
    """Write both rates with their counts, in one line for the screen."""
    rates = (("CER", test.characters, "characters"), ("WER", test.words, "words"))
    return ", ".join(
        f"{name} {100 * counts.rate:.1f} % ({counts.errors} / {counts.total} {unit})"
        for name, counts, unit in rates
    )


def describe_results(results: Sequence[Scored]) -> str:
    """Write both rates of a split and, where another decoder was used, those of the greedy one."""
    line = describe_rates(total_scores(results))
    interval, greedy = _intervals(results)["WER"], total_greedy(results)
    if interval is not None:
        line += f", 95 % interval of WER {interval}"
    return line if greedy is None else f"{line}; greedily {describe_rates(greedy)}"


def total_greedy(results: Sequence[Scored]) -> Scores | None:
    """Add the scores of greedy decoding; None where there are none."""
    greedy = [each.greedy for each in results if each.greedy is not None]
    return sum(greedy, Scores()) if greedy else None


def result_figures(results: Sequence[Scored]) -> dict[str, Any]:
    """Return the rates of a split with their counts, and those of greedy decoding beside them."""
    figures, greedy = error_figures(total_scores(results)), total_greedy(results)
    for name, interval in _intervals(results).items():
        figures[f"{name}_interval"] = None if interval is None else asdict(interval)
    figures["references"] = hash_references(results)
    return figures if greedy is None else {**figures, "greedy": error_figures(greedy)}


def _intervals(results: Sequence[Scored]) -> dict[str, Interval | None]:
    """Return the 95 % interval of each rate; None where too little is known."""
    speakers = [each.speaker for each in results]
    counts = {
        "WER": [each.scores.words for each in results],
        "CER": [each.scores.characters for each in results],
    }
    return {
        name: rate_interval([one.errors for one in of], [one.total for one in of], speakers)
        for name, of in counts.items()
    }


def hash_references(results: Iterable[Scored]) -> str:
    """Return what tells a test set from another: a SHA-256 of its ids and references."""
    rows = sorted((each.id, each.reference) for each in results)
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()


def write_utterances(path: Path, results: Iterable[Scored]) -> None:
    """Write every utterance as a line of JSON: id, speaker, reference, hypothesis."""
    lines = (
        json.dumps(
            {
                "id": each.id,
                "speaker": each.speaker,
                "reference": each.reference,
                "hypothesis": each.hypothesis,
            },
            ensure_ascii=False,
        )
        for each in results
    )
    write_text_atomically(path, "".join(f"{line}\n" for line in lines))


def error_figures(test: Scores) -> dict[str, Any]:
    """Return the rates of a split, with the counts that they are made of."""
    return {
        "WER": test.wer,
        "CER": test.cer,
        "utterances": test.utterances,
        "words": test.words.total,
        "characters": test.characters.total,
        "word_errors": _edits(test.words),
        "character_errors": _edits(test.characters),
    }


def _edits(counts: ErrorCounts) -> dict[str, int]:
    return {
        "substitutions": counts.substitutions,
        "deletions": counts.deletions,
        "insertions": counts.insertions,
    }
