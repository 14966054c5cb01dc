"""Texts that are read aloud, cut into sentences of several scripts."""

import pytest

from sbkit.text.sentences import split_text


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ('Mr. Wu said: "Yes."  He\nleft\n\nEnd', ['Mr. Wu said: "Yes."', "He left", "End"]),
        ("今天很好。他说。「好。」走", ["今天很好。", "他说。", "「好。」", "走"]),
        ("मैं घर गया। वह आया।", ["मैं घर गया।", "वह आया।"]),
        ("word " * 99 + "then, " + "more " * 99, None),
    ],
)
def test_text_is_split_into_sentences(text: str, sentences: list[str] | None) -> None:
    parts = split_text(text, seconds=200 if sentences is None else 5)
    if sentences is None:
        assert max(map(len, parts)) <= 100
        assert " ".join(parts).split() == text.split()
        assert "then," in {part.split()[-1] for part in parts}
    else:
        assert parts == sentences


def test_short_text_of_a_long_recording_is_not_cut_into_words() -> None:
    assert split_text("One two, three. ... ?!", seconds=600) == ["One two, three.", "...", "?!"]
