"""Errors are counted by kind, and stand in columns below the words."""

from dataclasses import astuple

from sbkit.evaluate.wer import count_errors, format_alignment


def test_count_errors_of_one_utterance() -> None:
    for reference, hypothesis, words, characters in (
        # substitutions, deletions, insertions, total
        ("", "", (0, 0, 0, 0), (0, 0, 0, 0)),
        ("a b", "", (0, 2, 0, 2), (0, 3, 0, 3)),
        ("", "a b", (0, 0, 2, 0), (0, 0, 3, 0)),
        ("a b", "ab", (1, 1, 0, 2), (0, 1, 0, 3)),
        ("the cat", "the cat sat", (0, 0, 1, 2), (0, 0, 4, 7)),
        ("  a \t b\u00a0c\n", "a b c", (0, 0, 0, 3), (0, 0, 0, 5)),
        ("日本語", "日本", (1, 0, 0, 1), (0, 1, 0, 3)),
    ):
        errors = count_errors(reference, hypothesis)
        assert astuple(errors.words) == words
        assert astuple(errors.characters) == characters
        assert errors.utterances == 1


def test_words_are_in_columns() -> None:
    for reference, hypothesis, marks in (
        ("", "", ""),
        ("日本 go", "日   no", "S    S"),
        ("re\u0301sume\u0301 ok", "resume no", "S      S"),
    ):
        lines = format_alignment(reference, " ".join(hypothesis.split()))
        assert lines == (reference, hypothesis, marks)
    # Characters, of which a space is visible, because it counts for the CER.
    lines = ("今␣天气**", "今*天气好", "  D    I")
    assert format_alignment("今 天气", "今天气好", by_words=False) == lines
