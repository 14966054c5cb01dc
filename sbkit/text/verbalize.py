"""Write text as it is read aloud, with marks where a voice pauses.

"Dr. Wu paid $5 in 1984!" -> "doctor wu paid five dollars in nineteen eighty four!"

num2words 0.5.14 spells numbers and amounts; `verbalize.toml` has the separators and words of six
languages. Numbers of other languages are parsed like English ones, without signs. Dates, times,
ranges, fractions and telephone numbers stay as written: not reading them is better than reading
them wrongly.
"""

import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from html import unescape
from importlib.resources import files
from typing import Any

import regex
from num2words import CONVERTER_CLASSES, num2words

from sbkit.base.messages import listed
from sbkit.text.languages import primary_language
from sbkit.text.normalization import UNSPACED_LETTERS, compose, is_spoken_symbol, normalize

MAX_CARDINAL_DIGITS = 30  # a longer number is read digit by digit
MAX_LISTED_SYMBOLS = 8
MAX_UNGROUPED_DIGITS = 6  # a longer number without separators is a code, unless it ends in 000

# In every language no-break spaces and apostrophes may separate groups of digits.
_GROUP_SIGNS = (
    "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}'\N{RIGHT SINGLE QUOTATION MARK}"
)
_SIGNS = "+\N{MINUS SIGN}\N{EN DASH}-"  # last, so that "-" makes no range in a character class
_SLASHES = "/\N{FRACTION SLASH}"
_FRACTIONS = "¼-¾⅐-⅞"
_NEVER = "(?!)"  # matches nothing
# What joins the digits of a date, a time, a range, a fraction, a version, a telephone number.
_JOINT = rf"(?:[.,:{_SLASHES}{_GROUP_SIGNS}{_SIGNS}]{{1,2}}| ?\(|\) ?)"
_PHONE = r"\+\d[\d ()./-]{5,}\d|0\d+(?: \d{3,})+"  # with spaces
# Words between an amount and its unit, in all languages with tables: "$1.5 million".
_SCALES = r"(?:thousand|mil\b|[MmBb]ill|trill|[Mm]ili|тысяч|милли)"

# Symbols of a number that is read without them: "5 Mio. €", "5 millions d'€", "5°", "¥5".
_UNREAD_BEFORE = regex.compile(r"\p{Sc}\s?$")
_UNREAD_AFTER = regex.compile(
    r"\s?(?:[^\W\d_]+\.?\s?(?:d['\u2019]|de\s)?)?\p{Sc}(?!\s?\d)|[\p{No}°]"
)

OnRead = Callable[[str, str], object]  # called with a part of the text and its words

MARKS = ",.;:?!"
_OTHER_MARKS = {"\N{EN DASH}": ",", "\N{EM DASH}": ",", "\N{HORIZONTAL ELLIPSIS}": "."}
_OTHER_MARKS |= {"\N{RIGHT SINGLE QUOTATION MARK}": "'"}
# ASCII marks with another meaning in a language.
_GREEK_MARKS, _ARMENIAN_MARKS = {";": "?", "·": ","}, {":": "."}
_MARKS_OF_LANGUAGES = {"el": _GREEK_MARKS, "grc": _GREEK_MARKS, "hy": _ARMENIAN_MARKS}
# Marks of other scripts, except inside numbers. Their Unicode names say what replaces them, by
# default ".". No space follows "。". A shad ends sentences, although Unicode does not say so.
_TERMINAL_MARK = regex.compile(
    r"(?V1)[[\p{Terminal_Punctuation}\p{SB=SContinue}]--[\p{ASCII}\p{Pd}\u0387]](?!(?<=\d.)\d)"
)
_NAMES_OF_MARKS = {"QUESTION": "? ", "EXCLAMATION": "! ", "SEMICOLON": "; ", "COLON": ": "}
_NAMES_OF_MARKS |= {"CAMNUC": ": ", "COMMA": ", ", "LITTLE": ", ", "WORD": " "}
_DOTTED_NAME = re.compile(r"(?<![\w.-])(?:[^\W\d_][\w-]*\.)+[^\W\d_][\w-]+")  # "example.com"
_CLAUSE = re.compile(rf"([,.;:?!]+)(?=[\s\"'»”)\]{UNSPACED_LETTERS}]|$)|\n+| - ")
_PARAGRAPH = re.compile(r"(?<![.?!\s])\s*\n\s*\n")
_TEXT_END = re.compile(r"(?<=[.?!])\s+")
_SPELLED_INITIALS = r"(?<!\.)(?P<initials>(?:[^\W\d_]\.)++)(?=\s+[^\W\d_])"  # "J. K. Rowling"
_NEXT_WORD = re.compile(r"\s*[\"'«„“(]?(\w\.?)")
# The tags of SSML 1.1 and of its vendors (<amazon:effect ...>), comments and the XML declaration.
_SSML = re.compile(
    r"<(?:/?(audio|break|desc|emphasis|lang|lexicon|lookup|mark|meta|metadata|p|phoneme|prosody|s"
    r"|say-as|speak|sub|token|voice|w|\w+:[\w-]+)(?:\s+[\w:.-]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*\s*/?"
    r"|!--.*?--|\?xml[^<>]*)>",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class SpokenText:
    """A text as it is read aloud, and notes on rewritten and dropped parts."""

    text: str
    notes: tuple[str, ...] = ()


def spell_out(text: str, language: str) -> SpokenText:
    """Write a text as it is read aloud: lower-case words, single spaces, and `MARKS`.

    Every remaining period ends a sentence. In languages without a table in `verbalize.toml`, only
    plain numbers become words, if num2words has the language.

    >>> spell_out("Dr. Wu paid $5!", "en").text
    'doctor wu paid five dollars!'
    """
    code = primary_language(language)
    notes: dict[str, None] = {}

    def on_read(written: str, words: str) -> None:
        reading = f'is read "{words}"' if words else "stays as written"
        notes[f'"{written}" {reading}.'] = None

    unreadable_chars = {char: None for char in text if not (char.isprintable() or char.isspace())}
    text = re.sub(r"&#?\w{2,31};", lambda entity: unescape(entity[0]), text)
    text = _TERMINAL_MARK.sub(_plain_mark, text)
    text = _PARAGRAPH.sub(".\n", compose(text).strip())
    text = _abbreviations(code).sub(partial(_expand, code, on_read), text)
    for name in _DOTTED_NAME.findall(text):
        on_read(name, "")
    marks = str.maketrans(_OTHER_MARKS | _MARKS_OF_LANGUAGES.get(code, {}))
    text = read_numbers(text, code, on_read).translate(marks)
    parts = [*_CLAUSE.split(text), ""]  # clauses and marks; None for a line end or a dash
    spoken = ""
    for clause, mark in zip(parts[::2], parts[1::2], strict=True):
        if words := normalize(clause, language):
            spoken += f" {words}" if spoken else words
        if spoken and spoken[-1] not in MARKS:
            spoken += "," if mark is None else mark[-1:]
    if unreadable_chars:
        codes = listed(f"U+{ord(char):04X}" for char in unreadable_chars)
        notes[f"Characters that cannot be read aloud are left out: {codes}."] = None
    counts = Counter(filter(is_spoken_symbol, text))
    dropped_symbols = [
        (n, char) for char, n in counts.most_common() if not normalize(char, language)
    ]
    if dropped_symbols:
        symbols = ", ".join(f"{n} {char}" for n, char in dropped_symbols[:MAX_LISTED_SYMBOLS])
        notes[f"normalization dropped symbols ({symbols})."] = None
    return SpokenText(spoken, tuple(notes))


def _plain_mark(match: regex.Match[str]) -> str:
    """Return one of `MARKS` for a mark of another script, or a space for one between words."""
    name = unicodedata.name(match[0], "")
    return next((mark for noun, mark in _NAMES_OF_MARKS.items() if noun in name), ". ")


def without_ssml(text: str) -> SpokenText:
    """Drop the tags of SSML, which voices do not follow, and warn of their names.

    >>> without_ssml('Wait <break time="1s"/>if a < b').text
    'Wait  if a < b'
    """
    if not (names := _SSML.findall(text)):
        return SpokenText(text)
    tags = [f"<{name}>" for name in dict.fromkeys(names) if name]  # comments have no name
    notes = (f"SSML is not supported, so its tags are left out: {listed(tags)}.",) if tags else ()
    return SpokenText(unescape(_SSML.sub(" ", text)), notes)


def split_sentences(spoken: str, max_length: int) -> list[str]:
    """Split the text of `spell_out` into sentences, and long ones at a comma or a space."""
    parts: list[str] = []
    for sentence in _TEXT_END.split(spoken):
        while len(sentence) > max_length:
            positions = (sentence.rfind(sign, 0, max_length) for sign in (", ", " "))
            cut = next((position + 1 for position in positions if position > 0), max_length)
            parts.append(sentence[:cut].strip())
            sentence = sentence[cut:]
        parts.append(sentence.strip())
    return [part for part in parts if part]


@cache
def _abbreviations(code: str) -> re.Pattern[str]:
    """Return a pattern of a language's abbreviations, "z. B." like "z.B.", and of initials."""
    tables = spoken_words(code).get("abbreviations", {}).values()
    abbreviations = {short for table in tables for short in table}
    abbreviations |= {short[0].upper() + short[1:] for short in abbreviations}
    keys = map(re.escape, sorted(abbreviations, key=len, reverse=True))
    alternatives = "|".join(re.sub(r"\\\.(?=\w)", r"\.\\s?", key) for key in keys)
    return re.compile(rf"(?<!\w)(?:(?P<short>{alternatives or _NEVER})(?!\w)|{_SPELLED_INITIALS})")


def _expand(code: str, on_read: OnRead, match: re.Match[str]) -> str:
    """Expand an abbreviation, with a period only if it also ends a sentence."""
    written = match[0]
    following = _NEXT_WORD.match(match.string, match.end())
    next_start = following[1] if following else ""
    is_before_capital = next_start[:1].isupper()
    if match["initials"]:
        is_pronoun = written == spoken_words(code).get("pronoun") and "." not in next_start
        is_initial = written.isupper() and is_before_capital and not is_pronoun
        return written.replace(".", "") if is_initial or written.count(".") > 1 else written
    short = re.sub(r"\.\s(?=\w)", ".", written)
    before = match.string[max(0, match.start() - 4) : match.start()]
    is_after_ordinal = re.fullmatch(r"\d(?:st|nd|rd|th)\s", before)
    conditions = {
        "capital": is_before_capital and not is_after_ordinal,  # "St. John", but "5th St. He"
        "number": next_start[:1].isdigit(),
        "inner": True,
        "final": True,
    }
    tables = spoken_words(code).get("abbreviations", {})
    for position in [position for position, applies in conditions.items() if applies]:
        table = tables.get(position, {})
        if words := table.get(short) or table.get(short[0].lower() + short[1:]):
            on_read(written, words)
            is_at_end = is_before_capital or not match.string[match.end() :].strip()
            return f"{words}." if position == "final" and is_at_end else str(words)
    return written


def spell_numbers(text: str, language: str) -> str:
    """Write a text's numbers in words, with single spaces, if num2words has the language."""
    words = read_numbers(text, language).split()
    return re.sub(r"\s+(?=[,.;:!?])", "", " ".join(words))


def read_numbers(
    text: str,
    language: str,
    on_read: OnRead = lambda written, words: None,
    *,
    whole: bool = False,
) -> str:
    """Write a text's numbers in words; other digits stay as written.

    on_read: called with each number and its words, or with other digits and an empty text.
    whole: also leave numbers with a symbol that would not be read, as in "$5 million".
    """
    reader = _reader(language)
    if reader is None:
        return text

    def read(match: regex.Match[str]) -> str:
        if whole and is_part(match):
            return str(match[0])
        try:
            words = " ".join(reader.read(match).split())
        except OverflowError:  # num2words has no words for so large a number
            words = ""
        on_read(match[0].strip(), words)
        if not words:
            return str(match[0])
        is_elided = match.string[max(0, match.start() - 1)] in "'\N{RIGHT SINGLE QUOTATION MARK}"
        return f"{'' if is_elided else ' '}{words} "

    def is_part(match: regex.Match[str]) -> bool:
        before = match.string[max(0, match.start() - 2) : match.start()]
        after = _UNREAD_AFTER.match(match.string, match.end())
        return _UNREAD_BEFORE.search(before) is not None or after is not None

    return str(reader.pattern.sub(read, text))


def languages_with_numbers() -> list[str]:
    """Return the languages whose numbers and amounts are read by a table."""
    return [*_tables()]


def spoken_words(language: str) -> Mapping[str, Any]:
    """Return the table of a language in `verbalize.toml`, or an empty one."""
    return _tables().get(language, {})


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(files("sbkit.text").joinpath("verbalize.toml").read_text("utf-8"))


@cache
def _reader(language: str) -> "_NumberReader | None":
    # For Amharic, num2words never returns from 1,234,567.
    if language not in CONVERTER_CLASSES or language == "am":
        return None
    return _NumberReader(language)


class _NumberReader:
    """Read the numbers of one language."""

    def __init__(self, language: str) -> None:
        self.language = language
        self.words = spoken_words(language)
        self.pattern = regex.compile(self._pattern())

    def _pattern(self) -> str:
        """Return a pattern of numbers, and of other digits, which have no group `whole`."""
        words = self.words
        group = re.escape(words.get("group", ",") + _GROUP_SIGNS)
        point = "[.]" if words.get("decimal", ".") == "." else "[.,]"
        currency = rf"[{''.join(words['currencies'])}]" if words else _NEVER
        sign = rf"(?<![^\s(\"«„'])[{_SIGNS}](?=\d|{currency})" if words else _NEVER
        ordinals = words.get("ordinals", _NEVER)
        unread = words.get("unread", _NEVER)
        return (
            rf"(?!{_PHONE}|{unread})(?<![.,])"
            rf"(?P<code>(?<!\w)[^\W\d_]+\.?)?(?P<sign>{sign})?"
            rf"(?:(?P<prefix>{currency})\s?(?![\d.,]+\s?{_SCALES}))?"
            r"(?P<whole>(?!0)\d{1,3}(?: \d{3})* 000(?! ?\d)"
            rf"|(?!0)\d{{1,3}}(?P<group>[{group}])\d{{3}}(?:(?P=group)\d{{3}})*(?!\d)|\d++)"
            rf"(?:(?P<point>{point})(?P<decimals>\d++))?"
            rf"(?![^\W\d_]*{_JOINT}?[\d{_FRACTIONS}]| \d+[{_SLASHES}])"
            r"(?!(?<=(?<!\d)\d{1,3}) \d{3}(?!\d))"
            rf"(?:(?P<ordinal>{ordinals})(?!\w)|\s?(?P<suffix>{currency})(?!\d))?(?!\s?[ºª])"
            r"(?=(?:\s(?P<noun>[^\W\d_]+))?)"
            rf"|{_PHONE}|(?<!\d)\d{{1,3}}(?: \d{{3}})+(?: \d+)*(?!\d)"
            rf"|\d(?:{_JOINT}?[\w{_FRACTIONS}])*(?:\s[ºª]\w*)?"
        )

    def read(self, match: regex.Match[str]) -> str:
        """Return a number in words, or an empty string if it is not read."""
        currency = match["prefix"] or match["suffix"]
        decimals = match["decimals"] or ""
        if (
            not match["whole"]
            or (currency and len(decimals) > 2)
            or (match["ordinal"] and decimals)
        ):
            return ""
        integer = re.sub(r"\D", "", match["whole"])
        noun = match["noun"] or ""
        code = (match["code"] or "").rstrip(".")
        if len(integer + decimals) > MAX_CARDINAL_DIGITS:
            words = self._digits(integer + decimals)
        elif currency:
            words = self._amount(integer, decimals, self.words["currencies"][currency])
        elif decimals:
            words = self._decimal(integer, match["point"], decimals)
        elif match["ordinal"]:
            words = self._spell(int(integer), to="ordinal")
        elif code:
            words = self._digits(integer)
        elif len(integer) == 4 and noun in self.words.get("years", ()):
            words = self._spell(int(integer), to="ordinal", case=self.words["years"][noun])
        else:
            spell = self._cardinal if match["group"] else self._whole
            words = spell(integer, self._gender(noun))
        sign = {None: "", "+": "plus"}.get(match["sign"], "minus")
        return f"{code} {self.words[sign] if sign else ''} {words}"

    def _amount(self, integer: str, decimals: str, currency: str) -> str:
        amount = f"{integer}.{decimals or 0}"
        words = self._spell(amount, to="currency", currency=currency, separator="|")
        units, _, cents = words.partition("|")
        return f"{units} {self.words['and']} {cents}" if decimals else units

    def _decimal(self, integer: str, point: str, decimals: str) -> str:
        name = self.words.get("point" if point == "." else "comma")
        if not name:
            return self._spell(f"{integer}.{decimals}")
        return f"{self._cardinal(integer)} {name} {self._digits(decimals)}"

    def _gender(self, noun: str) -> str:
        """Return "m" or "f" for a noun that is often counted, else an empty string."""
        nouns = {name[0]: self.words.get(name, _NEVER) for name in ("masculine", "feminine")}
        genders = (name for name, stems in nouns.items() if re.match(stems, noun.lower()))
        return next(genders, "")

    def _whole(self, digits: str, gender: str = "") -> str:
        """Read a whole number without separators; it may be a code or a year."""
        is_long = len(digits) > MAX_UNGROUPED_DIGITS and not digits.endswith("000")
        if is_long or (digits[0] == "0" and len(digits) > 1):
            return self._digits(digits)
        if len(digits) == 4 and re.match(self.words.get("pair_years", _NEVER), digits):
            return self._spell(int(digits), to="year")
        return self._cardinal(digits, gender)

    def _cardinal(self, digits: str, gender: str = "") -> str:
        options = {"gender": gender} if gender and self.words.get("options") else {}
        words = self._spell(int(digits), **options)
        inflections: Mapping[str, Sequence[tuple[str, str]]] = self.words.get("inflections", {})
        for pattern, replacement in inflections.get(gender or "any", ()):
            words = re.sub(pattern, replacement, words)
        return words

    def _digits(self, digits: str) -> str:
        return " ".join(self._spell(int(digit)) for digit in digits)

    def _spell(self, number: int | str, **options: object) -> str:
        return str(num2words(number, lang=self.language, **options)).replace(",", "")
