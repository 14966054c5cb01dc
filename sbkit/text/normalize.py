"""Transcripts as a model is to write them: one table per language, one function for all.

Letters are never dropped. A letter that a language does not write itself is replaced by the plain
letters it is made of ("café" in English: "cafe") or, where there are none, kept as it is.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

_LATIN = "abcdefghijklmnopqrstuvwxyz"
_DOTLESS_I = "\N{LATIN SMALL LETTER DOTLESS I}"


@dataclass(frozen=True)
class Orthography:
    """What one language writes: its letters, the marks inside words, the symbols it reads aloud.

    Attributes:
        letters: the lower-case letters of the language; empty means those of every script.
        joiners: marks kept between two letters of a word.
        rewrite: characters replaced before lower case is taken, among them symbols read as words.
    """

    letters: str = ""
    joiners: str = "'"
    rewrite: Mapping[str, str] = field(default_factory=dict)


ORTHOGRAPHIES: Mapping[str, Orthography] = {
    "en": Orthography(_LATIN, rewrite={"&": " and ", "%": " percent "}),
    "es": Orthography(_LATIN + "áéíñóúü", "", {"&": " y ", "%": " por ciento "}),
    "fr": Orthography(_LATIN + "àâæçèéêëîïôùûüÿœ", "'", {"&": " et ", "%": " pour cent "}),
    "it": Orthography(_LATIN + "àèéìíîòóùú", "'", {"&": " e ", "%": " per cento "}),
    # Without "ё": Russian writes its two dots as it pleases, the prompts "решётка" and "решетка".
    "ru": Orthography("абвгдежзийклмнопрстуфхцчшщъыьэюя", "", {"&": " и ", "%": " процентов "}),
    "de": Orthography(_LATIN + "äöüß", "'", {"&": " und ", "%": " prozent "}),
    "pt": Orthography(_LATIN + "àáâãçéêíóôõúü", "'", {"&": " e ", "%": " por cento "}),
    "nl": Orthography(_LATIN + "áèéêëíïóöúü", "'", {"&": " en ", "%": " procent "}),
    "pl": Orthography(_LATIN + "ąćęłńóśźż", "'", {"&": " i ", "%": " procent "}),
    "ca": Orthography(
        _LATIN + "àçèéíïòóúü", "'·", {"ŀ": "l·", "Ŀ": "l·", "&": " i ", "%": " per cent "}
    ),
    "tr": Orthography(rewrite={"I": _DOTLESS_I}),
    "az": Orthography(rewrite={"I": _DOTLESS_I}),
}
ANY_LANGUAGE = Orthography()

_APOSTROPHES = (
    "`\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}\N{MODIFIER LETTER APOSTROPHE}"
    "\N{ACUTE ACCENT}\N{SINGLE HIGH-REVERSED-9 QUOTATION MARK}\N{FULLWIDTH APOSTROPHE}"
)
# Lower case would turn "İ" into "i" and a loose dot, which no language wants.
_SAME = str.maketrans(dict.fromkeys(_APOSTROPHES, "'") | {"İ": "i"})
# Letters without a Unicode decomposition into the plain ones that stand in for them.
_PLAIN = {"æ": "ae", "œ": "oe", "ß": "ss", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th"}
_PLAIN |= {_DOTLESS_I: "i", "ħ": "h"}
_INITIALS = re.compile(r"(?<!\w)([^\W\d_])\.(?=[^\W\d_](?!\w))")  # the dots of "U.S.A." and "p.m."
_QUOTES = re.compile(r"'{2,}")
_TATWEEL = "\N{ARABIC TATWEEL}"


def orthography(language: str) -> Orthography:
    """Give the table of a language tag: of its first part if we have one, else the general one."""
    return ORTHOGRAPHIES.get(re.split("[-_]", language)[0].lower(), ANY_LANGUAGE)


def normalize(text: str, language: str) -> str:
    """Write a transcript in lower case, with the letters of its language and single spaces.

    Punctuation becomes a space, save the dots between initials and the apostrophes inside words of
    languages that write them. Digits stay. The result is in Unicode NFC, and normalizing it again
    changes nothing.
    """
    table = orthography(language)
    text = _compose(text).translate(_SAME)
    for char, word in table.rewrite.items():
        text = text.replace(char, word)
    text = _INITIALS.sub(r"\1", text.lower())
    text = _compose("".join(_write(char, table.letters, table.joiners) for char in text))
    words = (word.strip(table.joiners) for word in _QUOTES.sub(" ", text).split())
    return " ".join(word for word in words if word)


def _compose(text: str) -> str:
    """Drop what has no width, then join letters with the marks that now follow them."""
    return unicodedata.normalize("NFC", "".join(char for char in text if not _is_silent(char)))


@cache
def _is_silent(char: str) -> bool:
    """Tell soft hyphens, joiners and selectors of zero width, and letters that are only a line."""
    if char == _TATWEEL or unicodedata.category(char) in ("Cf", "Me"):
        return True
    return "VARIATION SELECTOR" in unicodedata.name(char, "")


@cache
def _write(char: str, letters: str, joiners: str) -> str:
    """Give what stands for one lower-case character: itself, plain letters, nothing or a space."""
    if char in joiners or char in letters or char.isdecimal():
        return char
    if char == "'":
        return ""
    if unicodedata.category(char) not in ("Ll", "Lu", "Lt", "Lm", "Lo", "Mn", "Mc", "Nl"):
        return " "
    if not letters:
        return char
    spelled = unicodedata.normalize("NFKD", _PLAIN.get(char, char))
    plain = "".join(_PLAIN.get(part, part) for part in spelled if not _is_accent(part))
    return plain if all(part in letters for part in plain) else char


def _is_accent(char: str) -> bool:
    """Tell the accents of Latin, Greek and Cyrillic from the vowel signs of other scripts."""
    return "\u0300" <= char <= "\u036f"
