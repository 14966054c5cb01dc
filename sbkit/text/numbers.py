"""Numbers as they are read aloud."""

import re

from num2words import num2words

_NUMBER = re.compile(
    r"(?P<code>(?<=[^\W\d_])\.?)?"
    r"(?P<number>\d{1,3}(?:,\d{3})+(?!\d)|\d+\.\d+|\d+)"
    r"(?P<ordinal>(?:st|nd|rd|th)\b)?"
)


def spell_numbers(text: str, language: str = "en") -> str:
    """Write the numbers of a text in words, with single spaces.

    In English four digits are read in pairs ("1234": "twelve thirty-four"), as years and extensions
    are. Longer runs, those that start with zero, and those after a letter ("H.323") are read digit
    by digit. num2words knows the words; 0.5.14 was read for en, es, fr, it and ru. The numbers of
    a language that it does not know stay.
    """
    try:
        text = _NUMBER.sub(lambda match: f" {_read(match, language)} ", text)
    except NotImplementedError:
        return text
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
