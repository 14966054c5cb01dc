"""What a finished run leaves to read: every utterance with its errors, and one page of figures."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sbkit.base.files import to_json, write_text_atomically
from sbkit.base.provenance import cpu_name, git_commit, versions
from sbkit.text.wer import ErrorCounts, Scored, Scores, align, total_scores


def write_wer(path: Path, scored: Iterable[Scored]) -> None:
    """Write every utterance with its aligned errors, the worst first, below the totals."""
    worst_first = sorted(scored, key=_badness)
    head = _describe_scores(total_scores(worst_first))
    bodies = map(_describe_utterance, worst_first)
    write_text_atomically(path, "\n".join([head, *bodies]))


def write_summary(
    path: Path,
    *,
    test: Scores,
    parameters: int,
    train_seconds: float,
    audio_seconds: float,
    device: torch.device,
    cost: Mapping[str, Any],
) -> None:
    """Write the run's figures as JSON.

    ``train_seconds`` is wall time; ``audio_seconds`` is all the audio trained on in it, every
    epoch and every rank counted; ``rtfx`` is their quotient, null for a run that did not train.
    ``cost`` is what was predicted beside what was taken.
    """
    summary = {
        "test": _test_figures(test),
        "parameters": parameters,
        "train_seconds": round(train_seconds, 1),
        "audio_seconds": round(audio_seconds, 1),
        "rtfx": round(audio_seconds / train_seconds, 1) if train_seconds > 0 else None,
        "cost": cost,
        "versions": versions(),
        "git_commit": git_commit(Path(__file__).parent),
        "machine": _machine(device),
    }
    write_text_atomically(path, to_json(summary, indent=2) + "\n")


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


def _test_figures(test: Scores) -> dict[str, float | int | dict[str, int]]:
    return {
        "wer": test.wer,
        "cer": test.cer,
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


def _machine(device: torch.device) -> dict[str, str | int | None]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": str(device),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
