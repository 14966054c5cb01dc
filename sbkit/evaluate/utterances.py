"""The reference and hypothesis of every utterance of a test set: ``utterances_SET.jsonl``.

A line for each utterance, sorted by id:

    id, reference, hypothesis    text, as it was scored
    reference_words, reference_characters    counts
    word_errors, character_errors    substitutions, deletions and insertions
    by_words                     false for a language without spaces between words, whose lines have
                                 neither reference_words nor word_errors
    seconds, speaker             null if unknown
    words                        of the hypothesis: text, start and end in seconds, and confidence
                                 if there is a calibrated one
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sbkit.base.errors import DataError
from sbkit.base.files import to_json, write_text_atomically
from sbkit.evaluate.wer import ErrorCounts, Figures, ScoredUtterance
from sbkit.text.word import Word

PROVENANCE = "provenance"  # beside the figures, a record (`sbkit/checkpoint/provenance.py`)
PREFIX, SUFFIX = "utterances_", ".jsonl"


def utterances_file(folder: Path, split: str) -> Path:
    """Return the file with the utterances of a test set."""
    return folder / f"{PREFIX}{split}{SUFFIX}"


def list_test_sets(folder: Path) -> list[str]:
    """Return the names of the test sets whose utterances are in a folder, sorted."""
    files = folder.glob(f"{PREFIX}*{SUFFIX}")
    return sorted(file.name.removeprefix(PREFIX).removesuffix(SUFFIX) for file in files)


def write_utterances(path: Path, scored: Iterable[ScoredUtterance]) -> None:
    """Write a line for every utterance."""
    ordered = sorted(scored, key=lambda utterance: utterance.id)
    lines = [to_json(_row(utterance)) + "\n" for utterance in ordered]
    write_text_atomically(path, "".join(lines))


def _row(utterance: ScoredUtterance) -> Figures:
    row: Figures = {
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
    """Return the three kinds of errors by name."""
    return {name: count for name, count in asdict(counts).items() if name != "total"}


def read_utterances(path: Path) -> list[ScoredUtterance]:
    """Read a file of `write_utterances`; raise DataError if a line has another form."""
    try:
        lines = path.read_text("utf-8").split("\n")
        return [_scored(**json.loads(line)) for line in lines if line]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} has a line that is not an object with id, reference and hypothesis ({error}). "
            "Write it again: sbkit score RUN DATA --out DIR."
        ) from error


def _scored(*, id: str, reference: str, hypothesis: str, words: Any, **row: Any) -> ScoredUtterance:
    return ScoredUtterance(
        id,
        reference,
        hypothesis,
        speaker=row["speaker"] or "",
        seconds=row["seconds"],
        words=tuple(Word(**word) for word in words),
        by_words=row["by_words"],
    )


def hash_references(scored: Iterable[ScoredUtterance]) -> str:
    """Return the SHA-256 of all ids and references, independent of their order."""
    return hash_pairs((utterance.id, utterance.reference) for utterance in scored)


def hash_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 of ids with their references, independent of their order."""
    return hashlib.sha256(to_json(sorted(pairs)).encode()).hexdigest()
