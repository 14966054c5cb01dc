"""Verbalization: numbers and abbreviations in words, pauses, and dropped symbols."""

import random
from pathlib import Path

import pytest
import regex

from sbkit.text.verbalize import spell_out, split_sentences

# Language, text, and words by the rules of the language, not copied from the program.
TABLE = (Path(__file__).parent / "verbalize.tsv").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", TABLE)
def test_spell_out_follows_rules_of_language(line: str) -> None:
    language, text, expected = line.split("\t")
    assert spell_out(text, language).text == expected


def test_paragraph_ends_sentence_and_line_pauses() -> None:
    spoken = spell_out('Hello,  "World" - it\'s ME!\n\nTwo\nthree', "en").text
    assert split_sentences(spoken, 300) == ["hello, world, it's me!", "two, three"]
    assert split_sentences(spell_out("...", "en").text, 300) == []


def test_marks_of_every_script_end_sentences() -> None:
    chars = "".join(map(chr, range(0x80, 0x20000)))
    for mark in regex.findall(r"(?V1)[\p{STerm}--\u104a]", chars):  # a comma of Burmese
        assert len(split_sentences(spell_out(f"a{mark}b", "xx").text, 300)) == 2, ascii(mark)


def test_notes_name_readings_and_dropped_symbols() -> None:
    assert spell_out("plain words, only these.", "en").notes == ()
    *readings, dropped = spell_out("Dr. Wu, $5.20, 10:05, a.com \N{GRINNING FACE}", "en").notes
    assert readings == [
        '"Dr." is read "doctor".',
        '"a.com" stays as written.',
        '"$5.20" is read "five dollars and twenty cents".',
        '"10:05" stays as written.',
    ]
    assert "dropped symbols (1 \N{GRINNING FACE})" in dropped
    (dropped,) = spell_out("10 €, 5 %!½ of № 2 (a & b) - €", "sw").notes
    assert "dropped symbols (2 €, 1 %, 1 ½, 1 №, 1 &)" in dropped


@pytest.mark.parametrize("language", ["en", "es", "ru"])
def test_number_of_more_than_thirty_digits_is_read_digit_by_digit(language: str) -> None:
    zero, *digits = (spell_out(digit, language).text for digit in "0123456789")
    for number in ("9" * 30 + "1", "9'876" + "'543" * 10, f"-{'9' * 5000}"):
        words = set(spell_out(number, language).text.split())
        assert words - {"minus", "menos", "минус"} <= {zero, *digits}, words


@pytest.mark.parametrize("language", ["en", "de", "es", "fr", "it", "ru", "nl", "ja"])
def test_every_digit_of_any_text_is_read_or_noted(language: str) -> None:
    """Texts such as "A0.9.3" once raised IndexError."""
    draw = random.Random(language)
    signs = [*"0123456789" * 3, *"..,,--/:  €$%º'()+h°\N{MINUS SIGN}A"]
    signs += ["st", "er", "-го", "kg", "Mai", "½"]
    for _ in range(500):
        text = "".join(draw.choices(signs, k=20))
        spoken = spell_out(text, language)
        unread = " ".join(note for note in spoken.notes if "stays as written" in note)
        assert {*filter(str.isdecimal, spoken.text)} <= {*unread}, text


def test_split_sentences_cuts_long_text_at_commas_and_spaces() -> None:
    text = "one. two? three is long, and has a comma; it has spaces, too"
    expected = ["one.", "two?", "three is long,", "and has a comma;", "it has spaces, too"]
    assert split_sentences(text, 20) == expected
    assert split_sentences("x" * 45, 20) == ["x" * 20, "x" * 20, "x" * 5]
