"""Errors are counted by kind, and add up over a split."""

from dataclasses import astuple

import pytest

from sbkit.evaluate.wer import (
    ScoredUtterance,
    count_errors,
    format_alignment,
    total_errors,
)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "words", "characters"),
    [  # substitutions, deletions, insertions, total
        ("", "", (0, 0, 0, 0), (0, 0, 0, 0)),
        ("a b", "", (0, 2, 0, 2), (0, 3, 0, 3)),
        ("", "a b", (0, 0, 2, 0), (0, 0, 3, 0)),
        ("a b", "ab", (1, 1, 0, 2), (0, 1, 0, 3)),
        ("the cat", "the cat sat", (0, 0, 1, 2), (0, 0, 4, 7)),
        ("  a \t b\u00a0c\n", "a b c", (0, 0, 0, 3), (0, 0, 0, 5)),
        ("日本語", "日本", (1, 0, 0, 1), (0, 1, 0, 3)),
    ],
)
def test_count_errors_of_one_utterance(
    reference: str, hypothesis: str, words: tuple[int, ...], characters: tuple[int, ...]
) -> None:
    errors = count_errors(reference, hypothesis)
    assert astuple(errors.words) == words
    assert astuple(errors.characters) == characters
    assert errors.utterances == 1


def test_scores_add_counts_instead_of_averaging_rates() -> None:
    split = [
        ScoredUtterance("long", "a b c d e f g h i", "a b c d e f g h i"),
        ScoredUtterance("short", "a", "b"),
    ]
    total = total_errors(split)
    assert total.wer == 1 / 10
    assert total.cer == 1 / 18
    assert total.utterances == 2


@pytest.mark.parametrize(
    ("reference", "hypothesis", "lines"),
    [
        ("", "", ("", "", "")),
        ("a b", "a b", ("a b", "a b", "")),
        ("日本 go", "日 no", ("日本 go", "日   no", "S    S")),
        ("re\u0301sume\u0301 ok", "resume no", ("re\u0301sume\u0301 ok", "resume no", "S      S")),
    ],
)
def test_words_are_in_columns(reference: str, hypothesis: str, lines: tuple[str, str, str]) -> None:
    assert format_alignment(reference, hypothesis) == lines


def test_align_puts_characters_in_columns_without_words() -> None:
    """A space is a visible character, because it counts for the CER."""
    lines = ("今␣天气**", "今*天气好", "  D    I")
    assert format_alignment("今 天气", "今天气好", by_words=False) == lines
