"""What was said and heard in every utterance of a test set, for programs: ``utterances_SET.jsonl``.

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
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, to_json, write_text_atomically
from sbkit.evaluate.wer import ErrorCounts, Scored, score
from sbkit.text.word import Word

LARGEST = 4 << 30  # bytes; a million long utterances have 1 GB
LONGEST_TEXT = 1 << 18  # characters; two hours of speech have 100 000, and the time is quadratic


def utterances_file(folder: Path, split: str) -> Path:
    """Return where the utterances of a test set are written."""
    return folder / f"utterances_{split}.jsonl"


def write_utterances(path: Path, scored: Iterable[Scored]) -> None:
    """Write a line for every utterance."""
    ordered = sorted(scored, key=lambda each: each.id)
    write_text_atomically(path, "".join(to_json(_row(each)) + "\n" for each in ordered))


def read_utterances(path: Path) -> list[Scored]:
    """Read what `write_utterances` wrote, and count the errors anew.

    Raises:
        SbkitError: it is missing, or holds anything else.
    """
    content = read_regular(path, largest=LARGEST, what="The utterances of a test set")
    try:
        return [_read_row(json.loads(line)) for line in content.decode().split("\n") if line]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SbkitError(
            f"{path} must have an object with id, reference and hypothesis in every line, but has "
            f"another ({error}). Write it again: sbkit score RUN DATA --out DIR."
        ) from error


def hash_references(scored: Iterable[Scored]) -> str:
    """Return the SHA-256 of all ids and references, whatever their order."""
    return hash_pairs((each.id, each.reference) for each in scored)


def hash_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 of ids with their references, whatever their order."""
    return hashlib.sha256(to_json(sorted(pairs)).encode()).hexdigest()


def _row(utterance: Scored) -> dict[str, Any]:
    words, characters = utterance.scores.words, utterance.scores.characters
    return {
        "id": utterance.id,
        "reference": utterance.reference,
        "hypothesis": utterance.hypothesis,
        "by_words": utterance.by_words,
        **(
            {"reference_words": words.total, "word_errors": edits(words)}
            if utterance.by_words
            else {}
        ),
        "reference_characters": characters.total,
        "character_errors": edits(characters),
        "seconds": utterance.seconds,
        "speaker": utterance.speaker or None,
        "words": [word.plain() for word in utterance.words],
    }


def edits(counts: ErrorCounts) -> dict[str, int]:
    """Return the three kinds of errors by their names."""
    return {name: count for name, count in asdict(counts).items() if name != "total"}


def _read_row(row: Mapping[str, Any]) -> Scored:
    texts = (row["id"], row["reference"], row["hypothesis"], row.get("speaker") or "")
    if not all(isinstance(each, str) for each in texts):
        raise TypeError(f"the utterance {str(row['id'])[:40]!r} is not made of texts")
    id, reference, hypothesis, speaker = texts
    if max(len(reference), len(hypothesis)) > LONGEST_TEXT:
        raise ValueError(f"the utterance {id[:40]!r} has more than {LONGEST_TEXT} characters")
    words = tuple(_read_word(each) for each in row.get("words") or ())
    # Refuses half a surrogate pair, which could not be printed.
    "".join([*texts, *(word.text for word in words)]).encode()
    seconds, by_words = row.get("seconds"), row.get("by_words", True) is not False
    return score(
        id,
        reference,
        hypothesis,
        speaker=speaker,
        seconds=seconds,
        words=words,
        by_words=by_words,
    )


def _read_word(values: Mapping[str, Any]) -> Word:
    text, confidence = values["text"], values.get("confidence")
    numbers = [values["start"], values["end"], *([] if confidence is None else [confidence])]
    if not isinstance(text, str) or not all(type(each) in (int, float) for each in numbers):
        raise TypeError(f"the word {str(values)[:60]!r} has no text, start and end")
    if confidence is not None and not 0 < confidence < 1:
        raise ValueError(f"the confidence {confidence!r} is not between 0 and 1")
    return Word(text, values["start"], values["end"], confidence)
