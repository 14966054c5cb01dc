"""The utterances of a test set as lines that programs read."""

import json
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import hash_references, read_utterances, write_utterances
from sbkit.text.word import Word

SET = [
    ScoredUtterance(
        "b",
        "hold the line",
        "told line",
        speaker="ann",
        seconds=1.25,
        words=(Word("told", 0.04, 0.4, 0.312), Word("line", 0.48, 1.0)),
    ),
    ScoredUtterance("a", "naïve\u2028 «да»", "", by_words=False),
]


def test_written_utterances_are_read_back(tmp_path: Path) -> None:
    write_utterances(tmp_path / "utterances_test.jsonl", SET)
    lines = (tmp_path / "utterances_test.jsonl").read_text("utf-8").removesuffix("\n").split("\n")
    assert json.loads(lines[1]) == {
        "id": "b",
        "reference": "hold the line",
        "hypothesis": "told line",
        "by_words": True,
        "reference_words": 3,
        "word_errors": {"substitutions": 1, "deletions": 1, "insertions": 0},
        "reference_characters": 13,
        "character_errors": {"substitutions": 1, "deletions": 4, "insertions": 0},
        "seconds": 1.25,
        "speaker": "ann",
        "words": [
            {"text": "told", "start": 0.04, "end": 0.4, "confidence": 0.312},
            {"text": "line", "start": 0.48, "end": 1.0},
        ],
    }
    first = json.loads(lines[0])
    assert (first["seconds"], first["speaker"], first["by_words"]) == (None, None, False)
    assert not {"reference_words", "word_errors"} & first.keys()
    assert read_utterances(tmp_path / "utterances_test.jsonl") == [SET[1], SET[0]]


def test_transcript_of_any_length_is_read_back(tmp_path: Path) -> None:
    long = [ScoredUtterance("a", "hold the line " * 25_000, "told line")]
    write_utterances(tmp_path / "utterances_test.jsonl", long)
    assert read_utterances(tmp_path / "utterances_test.jsonl") == long


def test_read_utterances_refuses_another_form(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"id": "a", "words": []}')
    with pytest.raises(SbkitError, match=r"broken.jsonl has a line that .*'reference'"):
        read_utterances(tmp_path / "broken.jsonl")


def test_hash_references_depends_on_ids_and_references_only() -> None:
    expected = hash_references(SET)
    assert hash_references([ScoredUtterance("a", SET[1].reference, "other"), SET[0]]) == expected
    assert hash_references([SET[0], ScoredUtterance("c", SET[1].reference, "")]) != expected
