"""Precision and recall of marks and capitals by a count that can be checked by hand."""

from dataclasses import replace

import pytest

from sbkit.evaluate.marks import describe_marks, measure_marks
from sbkit.evaluate.wer import ScoredUtterance
from sbkit.evaluate.wer_report import describe_results, figures_of_test_set

SPOKEN = ScoredUtterance("a", "Hello, Mr. Wu. Call me?", "hello Mister Wu, call me? Now.")


def test_marks_are_compared_word_by_word() -> None:
    """A mark behind a wrong word counts; one behind another word is wrong, and one is missing."""
    figures = measure_marks([SPOKEN])
    counts = {
        name: (row["right"], row["written"], row["expected"]) for name, row in figures.items()
    }
    assert counts == {".": (0, 1, 2), ",": (0, 1, 1), "?": (1, 1, 1), "capitals": (2, 3, 4)}
    assert [*figures] == [".", ",", "?", "capitals"]
    assert figures["capitals"]["precision"] == pytest.approx(2 / 3)
    assert figures["capitals"]["recall"] == 1 / 2
    assert describe_marks(figures).endswith("66.7 % and 50.0 % (2 right / 3 written / 4 expected)")


@pytest.mark.parametrize(
    ("reference", "hypothesis", "by_words", "right"),
    [
        ("iPhone", "Iphone", True, {"capitals": 0}),
        ("USA", "UsA", True, {"capitals": 2}),
        ("Hello.", "Helo.", True, {".": 1, "capitals": 1}),
        ("你好。再见。", "你好再。见。", False, {"。": 1}),
        ("it's plain", "its plain", True, {}),
    ],
)
def test_right_marks(
    reference: str, hypothesis: str, by_words: bool, right: dict[str, int]
) -> None:
    figures = measure_marks([ScoredUtterance("a", reference, hypothesis, by_words=by_words)])
    assert {name: row["right"] for name, row in figures.items()} == right


def test_mark_that_nobody_wrote_has_no_precision() -> None:
    figures = measure_marks([ScoredUtterance("a", "Now.", "now")])
    assert (figures["."]["precision"], figures["."]["recall"]) == (None, 0.0)
    assert describe_marks(figures).startswith("'.' none and 0.0 % (0 right / 0 written")


def test_normalizer_that_changes_the_number_of_words_is_noted() -> None:
    """Whisper's basic one splits Hindi at its signs of vowels."""
    scored = [ScoredUtterance("a", "हिन्दी भाषा", "हिन्दी")]
    for words, noted in ((2, ""), (7, " (the normalizer makes 7 words of 2, so the WER counts")):
        plain = replace(scored[0], reference="x " * words, normalizer="basic 0123")
        line = describe_results(figures_of_test_set([replace(scored[0], normalized=plain)]))
        assert noted in line and ("the normalizer makes" in line) == bool(noted)
