"""Text as it is spoken: words in the letters of its language, and marks where a voice pauses.

"Dr. Wu paid $5 on 2026-11-23!" -> "doctor wu paid five dollars on november twenty-third, ..!"
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sbkit.text.languages import primary
from sbkit.text.normalize import describe_dropped, normalize
from sbkit.text.numbers import spell_numbers

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
_SENTENCE = re.compile(r"(?<=[.?!])\s+|\n\s*\n")
_ABBREVIATIONS = {
    "en": "Mr.=mister Mrs.=missus Ms.=miss Dr.=doctor Prof.=professor e.g.=for_example "
    "i.e.=that_is etc.=et_cetera vs.=versus approx.=approximately",
    "de": "Dr.=doktor Prof.=professor z.B.=zum_beispiel d.h.=das_heißt usw.=und_so_weiter",
    "es": "Sr.=señor Sra.=señora Dr.=doctor Dra.=doctora etc.=etcétera EE.UU.=estados_unidos",
    "fr": "MM.=messieurs Mme=madame Mlle=mademoiselle Dr=docteur etc.=et_cetera",
    "it": "Sig.=signor Dott.=dottor Prof.=professor ecc.=eccetera",
}
_MONTHS = {
    "en": "january february march april may june july august september october november december",
    "de": "januar februar märz april mai juni juli august september oktober november dezember",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre "
    "diciembre",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "it": "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre "
    "dicembre",
    "ru": "января февраля марта апреля мая июня июля августа сентября октября ноября декабря",
}
_MONEY = {
    "en": {"$": "dollars", "€": "euros", "£": "pounds"},
    "de": {"$": "dollar", "€": "euro", "£": "pfund"},
    "es": {"$": "dólares", "€": "euros", "£": "libras"},
    "fr": {"$": "dollars", "€": "euros", "£": "livres"},
    "it": {"$": "dollari", "€": "euro", "£": "sterline"},
    "ru": {"$": "долларов", "€": "евро", "₽": "рублей"},
}
_DATE = re.compile(r"\b(\d{4})-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])\b")
_TIME = re.compile(r"\b(\d{1,2}):([0-5]\d)\b")
_PRICE = re.compile(r"([$€£₽])\s?(\d[\d.,]*\d|\d)|(\d[\d.,]*\d|\d)\s?([$€£₽])")
_WITH_NUMBER = re.compile(r"\S*\d\S*")


@dataclass(frozen=True)
class Spoken:
    """A text as it is spoken, and notes on what is read in other words, or dropped."""

    text: str
    notes: tuple[str, ...] = ()


def spell_out(text: str, language: str) -> Spoken:
    """Write a text as it is read aloud: lower-case words with single spaces, and `MARKS`.

    Abbreviations, dates (2026-11-23), times (10:30) and amounts of money are those of the six
    languages above; numbers those of num2words.
    """
    read = dict[str, str]()
    text, code = unicodedata.normalize("NFC", text).translate(_OTHER_MARKS), primary(language)
    for pattern, words in (
        (_abbreviations(code), partial(_abbreviated, code)),
        (_DATE, partial(_date, code)),
        (_TIME, _time),
        (_PRICE, partial(_price, code)),
        (_WITH_NUMBER, lambda match: spell_numbers(match[0], code)),
    ):
        text = pattern.sub(partial(_noted, words, read), text)
    clauses, spoken = _CLAUSE.split(text), ""
    for clause, mark in zip(clauses[::2], [*clauses[1::2], ""], strict=True):
        if said := normalize(clause, language):
            spoken += f" {said}" if spoken else said
        if spoken and spoken[-1] not in MARKS:
            spoken += mark[-1] if mark else "," * (clause is not clauses[-1])
    notes = [f'"{each}" is read "{said}".' for each, said in read.items()]
    dropped = describe_dropped(Counter(text), language)
    return Spoken(spoken, (*notes, *([f"{dropped}."] if dropped else [])))


def split_sentences(text: str, longest: int) -> list[str]:
    """Split a text after each end of a sentence; one of more characters at a comma or a space."""
    found = list[str]()
    for sentence in _SENTENCE.split(text):
        while len(sentence) > longest:
            places = (sentence.rfind(each, 0, longest) for each in (", ", " "))
            cut = next((each + 1 for each in places if each > 0), longest)
            found.append(sentence[:cut].strip())
            sentence = sentence[cut:]
        found.append(sentence.strip())
    return [each for each in found if each]


def _noted(
    words: Callable[[re.Match[str]], str], read: dict[str, str], match: re.Match[str]
) -> str:
    found = words(match)
    if found != match[0]:
        read.setdefault(match[0], found.strip(" " + MARKS))
    return found


def _table(code: str) -> Mapping[str, str]:
    pairs = (each.split("=") for each in _ABBREVIATIONS.get(code, "").split())
    return {short.replace("_", " ").lower(): words.replace("_", " ") for short, words in pairs}


def _abbreviations(code: str) -> re.Pattern[str]:
    shorts = "|".join(map(re.escape, _table(code))) or "(?!)"
    return re.compile(rf"(?<!\w)({shorts})(?!\w)", re.IGNORECASE)


def _abbreviated(code: str, match: re.Match[str]) -> str:
    return _table(code)[match[0].lower()]


def _date(code: str, match: re.Match[str]) -> str:
    if code not in _MONTHS:
        return match[0]
    month, day = _MONTHS[code].split()[int(match[2]) - 1], int(match[3])
    if code == "en":
        ending = {1: "st", 2: "nd", 3: "rd"}.get(day % 10 if day not in (11, 12, 13) else 0, "th")
        return f"{month} {spell_numbers(f'{day}{ending}')}, {spell_numbers(match[1])}"
    return f"{spell_numbers(str(day), code)} {month} {spell_numbers(match[1], code)}"


def _time(match: re.Match[str]) -> str:
    return match[1] if match[2] == "00" else f"{match[1]} {int(match[2])}"


def _price(code: str, match: re.Match[str]) -> str:
    sign, amount = (match[1], match[2]) if match[1] else (match[4], match[3])
    word = _MONEY.get(code, {}).get(sign)
    whole, _, cents = amount.partition(".")
    if len(cents) != 2:  # $1,000 or $2.5
        whole, cents = amount, "0"
    more = f" {spell_numbers(str(int(cents)), code)}" if int(cents) else ""
    return match[0] if word is None else f"{spell_numbers(whole, code)} {word}{more}"
