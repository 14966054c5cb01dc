"""Numbers as they are read aloud, for transcripts that write them in digits."""

import re
from collections.abc import Mapping

from num2words import num2words

# The words of the two extra telephone keys, in the languages whose prompts have them.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "en": {"*": "star", "#": "pound"},
    "es": {"*": "asterisco", "#": "numeral"},
    "fr": {"*": "étoile", "#": "dièse"},
    "it": {"*": "asterisco", "#": "cancelletto"},
    "ru": {"*": "звездочка", "#": "решетка"},
}
_NUMBER = re.compile(
    r"(?P<code>(?<=[^\W\d_])\.?)?"
    r"(?P<number>\d{1,3}(?:,\d{3})+(?!\d)|\d+\.\d+|\d+)"
    r"(?P<ordinal>(?:st|nd|rd|th)\b)?"
)


def spell_digits(text: str, language: str = "en") -> str:
    """Spell the numbers of a text, and the keys * and # of a telephone, as they are read aloud.

    In English four digits are read in pairs ("1234": "twelve thirty-four"), as years and extensions
    are. Longer runs, those that start with zero, and those after a letter ("H.323") are read digit
    by digit. num2words knows the words; 0.5.14 was read for en, es, fr, it and ru.
    """
    for key, word in _KEYS.get(language, {}).items():
        text = text.replace(key, f" {word} ")
    text = _NUMBER.sub(lambda match: f" {_read(match, language)} ", text)
    return re.sub(r"\s+(?=[,.;:!?])", "", " ".join(text.split()))


def _read(match: re.Match[str], language: str) -> str:
    """Choose between an ordinal, a code, a year and a plain number."""
    number = match["number"]
    if match["ordinal"] and language == "en":
        return _words(number, language, "ordinal")
    if match["code"] is not None or (number.isdigit() and (len(number) > 4 or number[0] == "0")):
        return " ".join(_words(digit, language) for digit in number if digit.isdigit())
    if language == "en" and number.isdigit() and len(number) == 4:
        return _words(number, language, "year")
    return _words(number.replace(",", ""), language)


def _words(number: str, language: str, kind: str = "cardinal") -> str:
    return str(num2words(number, lang=language, to=kind)).replace(",", "")
