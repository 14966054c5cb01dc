"""Write text as it is read aloud, with marks where a voice pauses.

"Dr. Wu paid $5 on 2026-11-23!" -> "doctor wu paid five dollars on november twenty third, ..!"

num2words 0.5.14 spells whole numbers; `verbalize.toml` has the separators and words of six
languages. In others, numbers are read as in English, without signs or units.
"""

import itertools
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
from num2words import num2words

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
_CURRENCIES = "$€£₽"
_SIGNS = "+\N{MINUS SIGN}\N{EN DASH}-"  # last, so that "-" makes no range in a character class
_NEVER = "(?!)"  # matches nothing
_VULGAR_FRACTION = re.compile(r"[¼-¾⅐-⅞]")
_ISO_TIME = re.compile(r"(?<=\d-\d\d)T(?=\d\d:\d\d)")  # 2026-11-27T10:00
# Words between an amount and its unit, in all languages with tables: "$1.5 million".
_SCALES = (
    r"thousand|trillion|[BbMm]illion(?:s|en)?|[Mm]illiard(?:s|en?)?|mil(?:l[oó]n|ion|iard)(?:es|[eio])?"
    r"|(?:тысяч|миллион|миллиард)\w*"
)

Note = Callable[[str, str], object]  # called with a part of the text and its words

MARKS = ",.;:?!"
_OTHER_MARKS = {"\N{EN DASH}": ",", "\N{EM DASH}": ",", "\N{HORIZONTAL ELLIPSIS}": "."}
_OTHER_MARKS |= {"\N{RIGHT SINGLE QUOTATION MARK}": "'"}
# ASCII marks with another meaning in a language.
_GREEK_MARKS, _ARMENIAN_MARKS = {";": "?", "·": ","}, {":": "."}
_MARKS_OF_LANGUAGES = {"el": _GREEK_MARKS, "grc": _GREEK_MARKS, "hy": _ARMENIAN_MARKS}
# Marks of other scripts, but for those in numbers. Their names say what they are, and "." is the
# rest: no space follows "。", and a shad ends sentences, although Unicode does not say so.
_TERMINAL_MARK = regex.compile(
    r"(?V1)[[\p{Terminal_Punctuation}\p{SB=SContinue}]--[\p{ASCII}\p{Pd}\u0387]](?!(?<=\d.)\d)"
)
_NAMES_OF_MARKS = {"QUESTION": "? ", "EXCLAMATION": "! ", "SEMICOLON": "; ", "COLON": ": "}
_NAMES_OF_MARKS |= {"CAMNUC": ": ", "COMMA": ", ", "LITTLE": ", ", "WORD": " "}
_DOTTED_NAME = re.compile(r"(?<![\w.-])[^\W\d_][\w-]*+(?:\.[\w-]++)++")  # "www.example.com"
_CLAUSE = re.compile(rf"([,.;:?!]+)(?=[\s\"'»”)\]{UNSPACED_LETTERS}]|$)|\n+| - ")
_PARAGRAPH = re.compile(r"(?<![.?!\s])\s*\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.?!])\s+")
_INITIALS = r"(?<!\.)(?P<initials>(?:[^\W\d_]\.)++)(?=\s+[^\W\d_])"  # "J. K. Rowling"
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
    readings: dict[str, str] = {}
    unreadable = {char: None for char in text if not (char.isprintable() or char.isspace())}
    text = re.sub(r"&#?\w{2,31};", lambda entity: unescape(entity[0]), text)
    text = _TERMINAL_MARK.sub(_plain_mark, text)
    text = _PARAGRAPH.sub(".\n", compose(text).strip())
    text = _abbreviations(code).sub(partial(_expand, code, readings.setdefault), text)
    text = _DOTTED_NAME.sub(partial(_read_dots, code, readings.setdefault), text)
    marks = str.maketrans(_OTHER_MARKS | _MARKS_OF_LANGUAGES.get(code, {}))
    text = read_numbers(text, code, readings.setdefault).translate(marks)
    parts = [*_CLAUSE.split(text), ""]  # clauses and marks; None for a line end or a dash
    spoken = ""
    for clause, mark in zip(parts[::2], parts[1::2], strict=True):
        if words := normalize(clause, language):
            spoken += f" {words}" if spoken else words
        if spoken and spoken[-1] not in MARKS:
            spoken += "," if mark is None else mark[-1:]
    notes = [f'"{written}" is read "{words}".' for written, words in readings.items()]
    if unreadable:
        codes = listed(f"U+{ord(char):04X}" for char in unreadable)
        notes.append(f"Characters that cannot be read aloud are left out: {codes}.")
    counts = Counter(filter(is_spoken_symbol, text))
    dropped = [(n, char) for char, n in counts.most_common() if not normalize(char, language)]
    if dropped:
        symbols = ", ".join(f"{n} {char}" for n, char in dropped[:MAX_LISTED_SYMBOLS])
        notes.append(f"normalization dropped symbols ({symbols}).")
    return SpokenText(spoken, tuple(notes))


def _plain_mark(match: regex.Match[str]) -> str:
    """Return one of `MARKS` for a mark of another script, or a space for one between words."""
    name = unicodedata.name(match[0], "")
    return next((mark for noun, mark in _NAMES_OF_MARKS.items() if noun in name), ". ")


def without_ssml(text: str) -> SpokenText:
    """Drop the tags of SSML, which voices do not follow, and note their names.

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
    for sentence in _SENTENCE.split(spoken):
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
    return re.compile(rf"(?<!\w)(?:(?P<short>{alternatives or _NEVER})(?!\w)|{_INITIALS})")


def _expand(code: str, note: Note, match: re.Match[str]) -> str:
    """Expand an abbreviation, with a period only if it also ends a sentence."""
    written = match[0]
    following = _NEXT_WORD.match(match.string, match.end())
    next_start = following[1] if following else ""
    before_capital = next_start[:1].isupper()
    if match["initials"]:
        is_pronoun = written == spoken_words(code).get("pronoun") and "." not in next_start
        is_initial = written.isupper() and before_capital and not is_pronoun
        return written.replace(".", "") if is_initial or written.count(".") > 1 else written
    short = re.sub(r"\.\s(?=\w)", ".", written)
    before = match.string[max(0, match.start() - 4) : match.start()]
    after_ordinal = re.fullmatch(r"\d(?:st|nd|rd|th)\s", before)
    conditions = {
        "capital": before_capital and not after_ordinal,  # "St. John", but "5th St. He"
        "number": next_start[:1].isdigit(),
        "inner": True,
        "final": True,
    }
    tables = spoken_words(code).get("abbreviations", {})
    for position in [position for position, applies in conditions.items() if applies]:
        table = tables.get(position, {})
        if words := table.get(short) or table.get(short[0].lower() + short[1:]):
            note(written, words)
            at_end = before_capital or not match.string[match.end() :].strip()
            return f"{words}." if position == "final" and at_end else str(words)
    return written


def spell_numbers(text: str, language: str) -> str:
    """Write a text's numbers in words, with single spaces, if num2words has the language."""
    words = read_numbers(text, language).split()
    return re.sub(r"\s+(?=[,.;:!?])", "", " ".join(words))


def _read_dots(code: str, note: Note, match: re.Match[str]) -> str:
    """Read the dots of a name such as "example.com"; "end.Next" lacks the space of a sentence."""
    written = match[0]
    last_label = written.rpartition(".")[2]
    if len(last_label) < 2 or not last_label[0].isalpha() or last_label.istitle():
        return written
    table = spoken_words(code)
    words = written.replace(".", f" {table.get('dot', table.get('point', ''))} ")
    note(written, " ".join(words.split()))
    return words


def read_numbers(text: str, language: str, note: Note = lambda written, words: None) -> str:
    """Write a text's numbers in words; call `note` with each number and its words."""
    reader = _reader(language)
    if reader is None:
        return text

    def read(match: re.Match[str]) -> str:
        words = " ".join(reader.read(match).split())
        if words:
            note(match[0].strip(" ."), words.rstrip("."))
        is_elided = match.string[max(0, match.start() - 1)] in "'\N{RIGHT SINGLE QUOTATION MARK}"
        return f"{'' if is_elided else ' '}{words} "

    if reader.words:
        text = _VULGAR_FRACTION.sub(
            lambda match: f" {unicodedata.normalize('NFKC', match[0])} ", text
        )
        text = _ISO_TIME.sub(", ", text)
    return reader.pattern.sub(read, text)


def languages_with_numbers() -> list[str]:
    """Return the languages whose numbers, money, dates and times are read in full."""
    return [*_tables()]


def spoken_words(language: str) -> Mapping[str, Any]:
    """Return the table of a language in `verbalize.toml`, or an empty one."""
    return _tables().get(language, {})


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(files("sbkit.text").joinpath("verbalize.toml").read_text("utf-8"))


@cache
def _reader(language: str) -> "_NumberReader | None":
    try:
        num2words(0, lang=language)
    except NotImplementedError:
        return None
    return _NumberReader(language)


class _NumberReader:
    """Read the numbers of one language."""

    def __init__(self, language: str) -> None:
        self.language = language
        self.words = spoken_words(language)
        self.months: list[str] = self.words.get("months", "").split()
        self.pattern = re.compile(self._pattern())

    def _pattern(self) -> str:
        """Return a pattern with one alternative for each method `_read_...`.

        A single pass tries them all, so that nothing is read twice or noted half-read.
        """
        words = self.words
        group = re.escape(words.get("group", ",") + _GROUP_SIGNS)
        point = "[.]" if words.get("decimal", ".") == "." else "[.,]"
        units = "|".join(map(re.escape, words.get("units", ()))) or _NEVER
        signs, currencies = (_SIGNS, _CURRENCIES) if words else ("\0", "\0")
        number = (
            r"(?P<number>(?P<code>(?<!\w)[^\W\d_]+\.?)?"
            rf"(?P<sign>(?<![^\s(\"«„'])[{signs}](?=[\d.,{currencies}]))?"
            rf"(?:(?P<currency>[{currencies}])\s?)?"
            rf"(?=\d|(?<![^\s({currencies}{signs}]){point}\d)"
            rf"(?P<whole>\d{{1,3}}(?: \d{{3}})* 000(?! ?\d)"
            rf"|\d{{1,3}}(?P<group>[{group}])\d{{3}}(?:(?P=group)\d{{3}})*(?!\d)|\d++)?+"
            rf"(?:(?P<point>{point})(?P<decimals>\d++))?(?<=\d)(?!\.\d)"
            rf"(?:(?P<ordinal>{words.get('ordinals', _NEVER)})(?!\w))?"
            rf"(?:\s(?P<scale>{_SCALES})(?(currency)(?!\w)|(?=\s?(?:{units})(?!\w))))?"
            rf"(?:\s?(?P<unit>{units})(?!\w))?"
            r"(?=(?:\s(?P<noun>[^\W\d_]+))?))|(?P<digits>\d+)"
        )
        if not words:
            return number
        grouped = r"\d{1,3}(?:\.\d{3})+(?!\.?\d)" if "." in words["group"] else _NEVER
        clock = words.get("clock_pattern", r"\d{1,2}:[0-5]\d")
        rank = r"\d{1,3}\.(?=\s(?P<ranked>[^\W\d_]+))" if "articles" in words else _NEVER
        return "|".join(
            (
                r"(?<![\w.])(?P<date>\d{4}-\d\d-\d\d|\d{1,2}[./]\d{1,2}[./]\d{4})(?![\w/])",
                rf"(?<![\d:.])(?P<time>{clock})(?::00)?(?![:\d])",
                r"(?<!\w)(?P<phone>\+\d[\d ()./-]{5,}\d|\(\d{3}\) ?\d{3}-\d{4}|\d+(?:-\d+){2,}"
                r"|\d{3}-\d{4}|0\d+(?:[ /-]\d{3,})+)(?!\w)",
                rf"(?<![\d.])(?!{grouped})(?P<version>\d+(?:\.\d+){{2,}})(?!\w)",
                r"(?<![\w/.,])(?P<fraction>(?:(?P<mixed>\d+) +)?"
                r"\d{1,2}[/\u2044]\d{1,2})(?![\w/]|[.,]\d)",
                r"(?:(?<=\d)|(?<=\d[ap]m)|(?<=\d [ap]m))(?P<range>[-\u2013])(?=\d)",
                rf"(?<!\w)(?P<rank>{rank})",
                number,
            )
        )

    def read(self, match: re.Match[str]) -> str:
        return str(getattr(self, f"_read_{match.lastgroup}")(match))

    def _read_digits(self, match: re.Match[str]) -> str:
        return self._digits(match[0])

    def _read_phone(self, match: re.Match[str]) -> str:
        plus = f"{self.words['plus']} " if match[0][0] == "+" else ""
        return plus + ", ".join(map(self._digits, re.findall(r"\d+", match[0])))

    def _read_version(self, match: re.Match[str]) -> str:
        return f" {self.words['point']} ".join(map(self._whole, match[0].split(".")))

    def _read_date(self, match: re.Match[str]) -> str:
        numbers = [int(digits) for digits in re.findall(r"\d+", match[0])]
        year, month, day = numbers if numbers[0] > 31 else numbers[::-1]
        if self.words.get("month_first") and "/" in match[0] and day <= 12:
            month, day = day, month
        if not (0 < month <= 12 and 0 < day <= 31):
            return " ".join(self._whole(str(number)) for number in numbers)
        inflection = self.words.get("date_year")
        return str(self.words["date"]).format(
            day=self._day(day, _word_before(match)),
            month=self.months[month - 1],
            year=self._ordinal(year, **inflection) if inflection else self._whole(str(year)),
        )

    def _day(self, day: int, before: str) -> str:
        if "articles" in self.words:
            return self._rank(day, before)
        ordinal_days = self.words.get("ordinal_days")
        if ordinal_days == "all" or (ordinal_days == "first" and day == 1):
            return self._ordinal(day, **self.words.get("day", {}))
        return self._cardinal(str(day))

    def _read_rank(self, match: re.Match[str]) -> str:
        """Read "3." before a word; it is an ordinal in "der 3. Platz" and "3. Mai"."""
        digits = match[0][:-1]
        before = _word_before(match)
        if before.lower() in self.words["articles"] or match["ranked"] in self.months:
            return self._rank(int(digits), before)
        return f"{self._whole(digits)}."

    def _rank(self, number: int, before: str) -> str:
        """Write a German ordinal with the ending that the word before it requires."""
        return self._ordinal(number) + str(self.words["articles"].get(before.lower(), "r"))

    def _read_time(self, match: re.Match[str]) -> str:
        hour, minute = re.findall(r"\d+", match["time"])
        full_hour, usual, first_minutes = map(str, self.words["clock"])
        clock = full_hour if minute == "00" else first_minutes if minute[0] == "0" else usual
        return clock.format(
            hour=self._cardinal(str(int(hour)), self.words["hour_gender"]),
            unit=self._form(int(hour), self.words["hour"]),
            minute=self._whole(str(int(minute))),
        )

    def _read_fraction(self, match: re.Match[str]) -> str:
        numbers = re.findall(r"\d+", match[0])
        *_, over, under = map(int, numbers)
        if not 0 < over < under <= 10:
            return " ".join(map(self._whole, numbers))
        if match["mixed"] and under == 2:
            return str(self.words["mixed"][0]).format(self._cardinal(match["mixed"], "m"))
        singular, plural = self.words["fractions"].split(", ")[under - 2].split()
        gender = self.words.get("fraction_gender", "m")
        words = f"{self._cardinal(str(over), gender)} {singular if over == 1 else plural}"
        mixed = self._cardinal(match["mixed"]) if match["mixed"] else ""
        return str(self.words["mixed"][1]).format(mixed, words) if mixed else words

    def _read_range(self, match: re.Match[str]) -> str:
        """Read the dash between rising numbers as a range; other dashes are silent."""
        start, end = match.span()
        before = match.string[max(0, start - 9) : start]
        ((first, half_day),) = re.findall(r"(\d[\d:]*)( ?[ap]m)?$", before)
        last = re.findall(r"[\d:]+", match.string[end : end + 9])[0]
        is_rising = int(first.replace(":", "")) < int(last.replace(":", ""))
        return str(self.words["to"]) if half_day or is_rising else ""

    def _read_number(self, match: re.Match[str]) -> str:
        integer = re.sub(r"\D", "", match["whole"] or "")
        decimals = match["decimals"] or ""
        unit = self.words["units"].get(match["currency"] or match["unit"]) if self.words else None
        if len(integer) > MAX_CARDINAL_DIGITS:
            words = self._digits(integer + decimals)
        elif unit and match["scale"]:
            count = self._decimal(integer, match["point"], decimals) if decimals else ""
            count = count or self._cardinal(integer, self._gender(match["scale"]))
            forms = unit[: len(self.words["hour"])]
            words = self._count(10**6, forms, f"{count} {match['scale']}")
        elif unit:
            words = self._amount(integer, match["point"], decimals, unit)
        elif decimals:
            words = self._decimal(integer, match["point"], decimals)
        elif match["ordinal"]:
            words = self._suffixed(int(integer), match["ordinal"].lstrip("-."))
        elif match["code"]:
            words = self._digits(integer)
        else:
            words = self._bare(integer, match)
        sign = {None: "", "+": "plus"}.get(match["sign"], "minus")
        return f"{(match['code'] or '').rstrip('.')} {self.words[sign] if sign else ''} {words}"

    def _bare(self, integer: str, match: re.Match[str]) -> str:
        """Read a whole number by the words around it."""
        noun = match["noun"] or ""
        before = _word_before(match)
        if len(integer) <= 2 and not {noun, before}.isdisjoint(self.months):
            return self._day(int(integer), before)
        if len(integer) == 4 and noun in self.words.get("years", ()):
            return self._ordinal(int(integer), case=self.words["years"][noun])
        spell = self._cardinal if match["group"] else self._whole
        return spell(integer, self._gender(noun))

    def _amount(self, integer: str, point: str, decimals: str, unit: Sequence[str]) -> str:
        """Read an amount; `unit` has the forms of the unit, then of its hundredth part."""
        num_forms = len(self.words["hour"])
        forms, hundredth_forms = unit[:num_forms], unit[num_forms:]
        if not decimals:
            return self._count(int(integer), forms)
        units = int(integer or 0)
        if not hundredth_forms or len(decimals) != 2:
            form = self._form(units, forms, has_decimals=True)
            return f"{self._decimal(integer, point, decimals)} {form}"
        amounts = [(units, forms), (int(decimals), hundredth_forms)]
        counted = [self._count(*amount) for amount in amounts if amount[0]]
        return f" {self.words['and']} ".join(counted) or self._count(0, forms)

    def _count(self, number: int, forms: Sequence[str], words: str = "") -> str:
        """Write a number of things: "two cents", "un millón de euros"; words: of the number."""
        of = self.words.get("of", "") if number and number % 10**6 == 0 else ""
        name = self._form(number, forms)
        if of and name[0] in "aeiouh":
            of = self.words.get("elided_of", of)
        return f"{words or self._cardinal(str(number), self._gender(forms[0]))} {of}{name}"

    def _form(self, number: int, forms: Sequence[str], *, has_decimals: bool = False) -> str:
        decimal_form: int | None = self.words.get("decimal_form")
        if has_decimals and decimal_form is not None:
            return forms[decimal_form]
        matches = (bool(re.search(rule, str(number))) for rule in self.words["form_rules"])
        return next(itertools.compress(forms, matches), forms[-1])

    def _gender(self, noun: str) -> str:
        """Return "m" or "f" for a noun that is often counted, else an empty string."""
        nouns = {name[0]: self.words.get(name, _NEVER) for name in ("masculine", "feminine")}
        return next((g for g, stems in nouns.items() if re.match(stems, noun.lower())), "")

    def _suffixed(self, number: int, suffix: str) -> str:
        """Write an ordinal with the ending that the letters after its number give."""
        ending = self.words.get("endings", {}).get(suffix[-1])
        if isinstance(ending, Mapping):
            return self._ordinal(number, **ending)
        irregular = self.words.get("irregular", {}).get(f"{number}{suffix}")
        words = irregular or self._ordinal(number)
        return words if ending is None else re.sub(r"o\b", ending, words)

    def _ordinal(self, number: int, **inflection: object) -> str:
        """Write an ordinal; `inflection`: num2words' options for Russian case and gender."""
        return self._spell(number, to="ordinal", **inflection).replace(",", "")

    def _decimal(self, integer: str, point: str | None, decimals: str) -> str:
        style = self.words.get("decimals")
        is_short = len(decimals) <= 3
        if not self.words or (style == "fraction" and is_short):
            return self._spell(f"{integer or 0}.{decimals}")
        fraction = self._digits(decimals)
        significant = decimals.lstrip("0")
        if style == "number" and is_short and significant:
            zeros = decimals.removesuffix(significant)
            fraction = f"{self._digits(zeros)} {self._cardinal(significant)}"
        whole_words = self._cardinal(integer) if integer else ""
        return f"{whole_words} {self.words['point' if point == '.' else 'comma']} {fraction}"

    def _whole(self, digits: str, gender: str = "") -> str:
        """Read a whole number without separators; it may be a code or a year."""
        is_round = digits.endswith("000") and len(digits) <= MAX_CARDINAL_DIGITS
        is_long = len(digits) > MAX_UNGROUPED_DIGITS and not is_round
        if is_long or (digits[0] == "0" and len(digits) > 1):
            return self._digits(digits)
        if len(digits) == 4 and re.match(self.words.get("pair_years", _NEVER), digits):
            return self._spell(int(digits), to="year")
        return self._cardinal(digits, gender)

    def _cardinal(self, digits: str, gender: str = "") -> str:
        options = {"gender": gender} if gender and self.words.get("options") else {}
        try:
            words = self._spell(int(digits), **options).replace(",", "")
        except OverflowError:
            return self._digits(digits)
        inflections: Mapping[str, Sequence[tuple[str, str]]] = self.words.get("inflections", {})
        for pattern, replacement in inflections.get(gender or "any", ()):
            words = re.sub(pattern, replacement, words)
        return words

    def _digits(self, digits: str) -> str:
        return " ".join(self._spell(int(digit)) for digit in digits)

    def _spell(self, number: int | str, **options: object) -> str:
        return str(num2words(number, lang=self.language, **options))


def _word_before(match: re.Match[str]) -> str:
    before = re.search(r"([^\W\d_]+)\s+$", match.string[max(0, match.start() - 40) : match.start()])
    return before[1] if before else ""
