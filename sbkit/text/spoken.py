"""Text as it is spoken: words in the letters of its language, and marks where a voice pauses.

"Dr. Wu paid $5 on 2026-11-23!" -> "doctor wu paid five dollars on november twenty third, ..!"
"""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial

from sbkit.text.languages import primary
from sbkit.text.normalize import describe_dropped, normalize
from sbkit.text.numbers import Note, read_numbers, spoken_words

MARKS = ",.;:?!"
_OTHER_MARKS = str.maketrans(
    {
        "\N{IDEOGRAPHIC COMMA}": ",",
        "\N{FULLWIDTH COMMA}": ",",
        "\N{IDEOGRAPHIC FULL STOP}": ".",
        "\N{FULLWIDTH QUESTION MARK}": "?",
        "\N{HORIZONTAL ELLIPSIS}": ".",
        "\N{EN DASH}": ",",
        "\N{EM DASH}": ",",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    }
)
_CLAUSE = re.compile(r"([,.;:?!]+)(?=[\s\"'»”)\]]|$)|\n+| - ")
_PARAGRAPH = re.compile(r"(?<![.?!\s])\s*\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.?!])\s+")
_INITIALS = r"(?<!\.)(?P<initials>(?:[^\W\d_]\.)++)(?=\s+[^\W\d_])"  # "J. K. Rowling"
_NEXT = re.compile(r"\s*[\"'«„“(]?(\w\.?)")


@dataclass(frozen=True)
class Spoken:
    """A text as it is spoken, and notes on what is read in other words, or dropped."""

    text: str
    notes: tuple[str, ...] = ()


def spell_out(text: str, language: str) -> Spoken:
    """Write a text as it is read aloud: lower-case words with single spaces, and `MARKS`.

    A period that is left ends a sentence. Abbreviations and numbers are those of the languages in
    `spoken.toml`; of other languages, plain numbers are read if num2words knows them.
    """
    code, read = primary(language), dict[str, str]()
    text = _PARAGRAPH.sub(".\n", unicodedata.normalize("NFC", text).strip())
    text = _abbreviations(code).sub(partial(_expand, code, read.setdefault), text)
    text = read_numbers(text, code, read.setdefault).translate(_OTHER_MARKS)
    clauses, spoken = _CLAUSE.split(text), ""
    for clause, mark in zip(clauses[::2], [*clauses[1::2], ""], strict=True):
        if said := normalize(clause, language):
            spoken += f" {said}" if spoken else said
        if spoken and spoken[-1] not in MARKS:
            spoken += mark[-1] if mark else "," * (clause is not clauses[-1])
    notes = [f'"{written}" is read "{words}".' for written, words in read.items()]
    dropped = describe_dropped(Counter(text), language)
    return Spoken(spoken, (*notes, *([f"{dropped}."] if dropped else [])))


def split_sentences(spoken: str, longest: int) -> list[str]:
    """Split what `spell_out` wrote after each sentence; longer ones at a comma or a space."""
    parts: list[str] = []
    for sentence in _SENTENCE.split(spoken):
        while len(sentence) > longest:
            places = (sentence.rfind(sign, 0, longest) for sign in (", ", " "))
            cut = next((place + 1 for place in places if place > 0), longest)
            parts.append(sentence[:cut].strip())
            sentence = sentence[cut:]
        parts.append(sentence.strip())
    return [part for part in parts if part]


@cache
def _abbreviations(code: str) -> re.Pattern[str]:
    """Match the abbreviations of a language, "z. B." like "z.B.", and initials."""
    shorts = {short for table in _tables(code).values() for short in table}
    shorts |= {short[0].upper() + short[1:] for short in shorts}
    keys = map(re.escape, sorted(shorts, key=len, reverse=True))
    known = "|".join(re.sub(r"\\\.(?=\w)", r"\.\\s?", key) for key in keys)
    return re.compile(rf"(?<!\w)(?:(?P<short>{known or '(?!)'})(?!\w)|{_INITIALS})")


def _tables(code: str) -> dict[str, dict[str, str]]:
    tables: dict[str, dict[str, str]] = spoken_words(code).get("abbreviations", {})
    return tables


def _expand(code: str, note: Note, match: re.Match[str]) -> str:
    """Write out an abbreviation, with a period only where it ends a sentence too."""
    following = _NEXT.match(match.string, match.end())
    next_start = following[1] if following else ""
    before_capital = next_start[:1].isupper()
    if match["initials"]:
        is_pronoun = match[0] == "I." and code == "en" and "." not in next_start
        is_initial = match[0].isupper() and before_capital and not is_pronoun
        return match[0].replace(".", "") if is_initial or match[0].count(".") > 1 else match[0]
    short = re.sub(r"\.\s(?=\w)", ".", match[0])
    before = match.string[max(0, match.start() - 4) : match.start()]
    after_ordinal = re.fullmatch(r"\d(?:st|nd|rd|th)\s", before)
    applies = {
        "capital": before_capital and not after_ordinal,  # "St. John", but "5th St. He"
        "number": next_start[:1].isdigit(),
        "inner": True,
        "final": True,
    }
    for kind, is_meant in applies.items():
        table = _tables(code).get(kind, {})
        words = table.get(short) or table.get(short[0].lower() + short[1:])
        if words and is_meant:
            note(match[0], words)
            at_end = not match.string[match.end() :].strip()
            return f"{words}." if kind == "final" and (before_capital or at_end) else words
    return match[0]
