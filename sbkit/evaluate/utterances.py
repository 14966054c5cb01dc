"""The reference and hypothesis of every utterance of a test set: ``utterances_SET.jsonl``.

A line for each utterance, sorted by id:

    id, reference, hypothesis    text, as it was scored
    reference_words, reference_characters    how many
    word_errors, character_errors    substitutions, deletions and insertions
    by_words                     false for a language that writes no spaces between words, whose
                                 lines have neither reference_words nor word_errors
    seconds, speaker             null where they are not known
    words                        of the hypothesis: text, start and end in seconds, and confidence
                                 where there is a calibrated one
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.evaluate.wer import ErrorCounts, ScoredUtterance
from sbkit.text.word import Word

PROVENANCE = "provenance"  # beside the figures, a record (`sbkit/checkpoint/provenance.py`)
PREFIX, SUFFIX = "utterances_", ".jsonl"


def utterances_file(folder: Path, split: str) -> Path:
    """Return where the utterances of a test set are written."""
    return folder / f"{PREFIX}{split}{SUFFIX}"


def list_test_sets(folder: Path) -> list[str]:
    """Return the names of the test sets whose utterances are in a folder, sorted."""
    files = folder.glob(f"{PREFIX}*{SUFFIX}")
    return sorted(each.name.removeprefix(PREFIX).removesuffix(SUFFIX) for each in files)


def write_utterances(path: Path, scored: Iterable[ScoredUtterance]) -> None:
    """Write a line for every utterance."""
    ordered = sorted(scored, key=lambda each: each.id)
    write_text_atomically(path, "".join(to_json(_row(each)) + "\n" for each in ordered))


def _row(utterance: ScoredUtterance) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": utterance.id,
        "reference": utterance.reference,
        "hypothesis": utterance.hypothesis,
        "by_words": utterance.by_words,
    }
    for unit in ("word", "character") if utterance.by_words else ("character",):
        counts = getattr(utterance.scores, f"{unit}s")
        row |= {f"reference_{unit}s": counts.total, f"{unit}_errors": edits(counts)}
    words = [word.plain() for word in utterance.words]
    return row | {
        "seconds": utterance.seconds,
        "speaker": utterance.speaker or None,
        "words": words,
    }


def edits(counts: ErrorCounts) -> dict[str, int]:
    """Return the three kinds of errors by their names."""
    return {name: count for name, count in asdict(counts).items() if name != "total"}


def read_utterances(path: Path) -> list[ScoredUtterance]:
    """Read what `write_utterances` wrote.

    Raises:
        SbkitError: a line is not one that it writes.
    """
    try:
        lines = path.read_text("utf-8").split("\n")
        return [_scored(**json.loads(line)) for line in lines if line]
    except (ValueError, KeyError, TypeError) as error:
        raise SbkitError(
            f"{path} must have an object with id, reference and hypothesis in every line, but has "
            f"another ({error}). Write it again: sbkit score RUN DATA --out DIR."
        ) from error


def _scored(*, id: str, reference: str, hypothesis: str, words: Any, **row: Any) -> ScoredUtterance:
    return ScoredUtterance(
        id,
        reference,
        hypothesis,
        speaker=row["speaker"] or "",
        seconds=row["seconds"],
        words=tuple(Word(**each) for each in words),
        by_words=row["by_words"],
    )


def hash_references(scored: Iterable[ScoredUtterance]) -> str:
    """Return the SHA-256 of all ids and references, whatever their order."""
    return hash_pairs((each.id, each.reference) for each in scored)


def hash_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 of ids with their references, whatever their order."""
    return hashlib.sha256(to_json(sorted(pairs)).encode()).hexdigest()
