"""Text as it is spoken: what is read in other words, where a voice pauses, what is dropped."""

import pytest

from sbkit.text.spoken import spell_out, split_sentences


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", 'Hello,  "World" - it\'s ME!', "hello, world, it's me!"),
        ("en", "Dr. Wu, e.g. Mr. X.", "doctor wu, for example mister x."),
        ("en", "On 2026-11-22.", "on november twenty second, twenty twenty six."),
        ("en", "At 10:30, or 9:00?", "at ten thirty, or nine?"),
        ("en", "$5.20 and $1,000", "five dollars twenty and one thousand dollars"),
        ("en", "50% of H.323; the 3rd", "fifty percent of h three two three; the third"),
        ("en", "One\ntwo\u2026 three", "one, two. three"),
        ("fr", "5 € le 2026-01-02", "cinq euros le deux janvier deux mille vingt six"),
        ("de", "z.B. 12 Äpfel", "zum beispiel zwölf äpfel"),
        ("ru", "Ёлка, 3 штуки", "елка, три штуки"),
        ("en", "...", ""),
    ],
)
def test_text_is_read_aloud(language: str, text: str, expected: str) -> None:
    assert spell_out(text, language).text == expected


def test_notes_say_what_is_read_and_what_is_dropped() -> None:
    assert spell_out("plain words, only these.", "en").notes == ()
    read, dropped = spell_out("7 \N{GRINNING FACE}", "en").notes
    assert read == '"7" is read "seven".'
    assert "dropped symbols (1 \N{GRINNING FACE})" in dropped


def test_long_text_is_cut_at_sentences_commas_and_spaces() -> None:
    text = "One. Two? Three is long, and has a comma; it has spaces, too\n\nFour"
    expected = ["One.", "Two?", "Three is long,", "and has a comma;", "it has spaces, too", "Four"]
    assert split_sentences(text, 20) == expected
    assert split_sentences("x" * 45, 20) == ["x" * 20, "x" * 20, "x" * 5]
