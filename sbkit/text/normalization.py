"""Normalization of transcripts: a table for each language, and one function for all.

Letters are never dropped. A letter that a language does not use is replaced by the plain letters it
consists of ("café" in English: "cafe"), or kept if it has none.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

from sbkit.text.languages import primary

NORMALIZER_VERSION = 4  # raise it when the normalized text of any sentence changes
MAX_REWRITE_LENGTH = 1000  # characters, of all replacements of a table

_LATIN = "abcdefghijklmnopqrstuvwxyz"
_DOTLESS_I = "\N{LATIN SMALL LETTER DOTLESS I}"
_GERESH, _GERSHAYIM = "\N{HEBREW PUNCTUATION GERESH}", "\N{HEBREW PUNCTUATION GERSHAYIM}"
_HEBREW_QUOTES = {_GERESH: "'", _GERSHAYIM: '"', "\N{RIGHT DOUBLE QUOTATION MARK}": '"'}


@dataclass(frozen=True)
class Orthography:
    """How one language is written: its letters, the marks within words, symbols read as words.

    Attributes:
        letters: the lower-case letters of the language; if empty, letters of every script.
        joiners: marks kept between two letters of a word.
        rewrite: characters replaced before lower-casing, among them symbols read as words.
        spaces: whether to keep spaces between letters of scripts that write none between words.
    """

    letters: str = ""
    joiners: str = "'"
    rewrite: Mapping[str, str] = field(default_factory=dict)
    spaces: bool = True


ORTHOGRAPHIES: Mapping[str, Orthography] = {
    "en": Orthography(_LATIN, rewrite={"&": " and ", "%": " percent "}),
    "es": Orthography(_LATIN + "áéíñóúü", "", {"&": " y ", "%": " por ciento "}),
    "fr": Orthography(_LATIN + "àâæçèéêëîïôùûüÿœ", "'", {"&": " et ", "%": " pour cent "}),
    "it": Orthography(_LATIN + "àèéìíîòóùú", "'", {"&": " e ", "%": " per cento "}),
    # Without "ё", whose two dots are optional in Russian: "решётка" and "решетка".
    "ru": Orthography("абвгдежзийклмнопрстуфхцчшщъыьэюя", "", {"&": " и ", "%": " процентов "}),
    "de": Orthography(_LATIN + "äöüß", "'", {"&": " und ", "%": " prozent "}),
    "pt": Orthography(_LATIN + "àáâãçéêíóôõúü", "'", {"&": " e ", "%": " por cento "}),
    "nl": Orthography(_LATIN + "áèéêëíïóöúü", "'", {"&": " en ", "%": " procent "}),
    "pl": Orthography(_LATIN + "ąćęłńóśźż", "'", {"&": " i ", "%": " procent "}),
    "ca": Orthography(
        _LATIN + "àçèéíïòóúü", "'·", {"ŀ": "l·", "Ŀ": "l·", "&": " i ", "%": " per cent "}
    ),
    **dict.fromkeys(("tr", "az", "crh", "gag"), Orthography(rewrite={"I": _DOTLESS_I})),
    # Marks of stress, question and exclamation stand within a word, on the vowel: "ինչո՞ւ".
    **dict.fromkeys(("hy", "hyw"), Orthography(rewrite={"՛": "", "՜": "", "՞": ""})),
    # Geresh and gershayim, or the quotes typed for them, are part of words.
    **dict.fromkeys(("he", "yi"), Orthography("", "'\"", _HEBREW_QUOTES)),
    # Two letters of Uzbek have a mark after them, in whose place people type other characters.
    "uz": Orthography(rewrite={"\N{MODIFIER LETTER TURNED COMMA}": "'"}),
}
ANY_LANGUAGE = Orthography()
UNSPACED = Orthography(spaces=False)

_APOSTROPHES = (
    "`\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}\N{MODIFIER LETTER APOSTROPHE}"
    "\N{ACUTE ACCENT}\N{SINGLE HIGH-REVERSED-9 QUOTATION MARK}\N{FULLWIDTH APOSTROPHE}"
)
# Lower case would turn "İ" into "i" and a combining dot.
_SAME = str.maketrans(dict.fromkeys(_APOSTROPHES, "'") | {"İ": "i"})
# Plain letters for letters that have no Unicode decomposition.
_PLAIN = {"æ": "ae", "œ": "oe", "ß": "ss", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th"}
_PLAIN |= {_DOTLESS_I: "i", "ħ": "h"}
_INITIALS = re.compile(r"(?<!\w)([^\W\d_])\.(?=[^\W\d_](?!\w))")  # the dots of "U.S.A." and "p.m."
_QUOTES = re.compile(r"'{2,}")
# Forms of one letter that differ only in width or position, and the ligatures "ﬀ" to "ﬗ" and "ĳ".
_SAME_LETTER = ("<wide>", "<narrow>", "<initial>", "<medial>", "<final>", "<isolated>")
_LIGATURES = re.compile("[\N{LATIN SMALL LIGATURE FF}-\N{ARMENIAN SMALL LIGATURE MEN XEH}Ĳĳ]")
# Punctuation that is often read aloud. All symbols and numbers ("€", "№", "½") are.
_SPOKEN_PUNCTUATION = "%&@#§‰٪"
_SPOKEN_CATEGORIES = ("Sc", "Sm", "So", "No")
# Languages that write no spaces between words: Chinese ones, then others.
_UNSPACED = {
    *("zh", "yue", "nan", "wuu", "gan", "hsn", "lzh"),
    *("ja", "th", "lo", "km", "my", "shn", "nod", "bo", "dz"),
}
# Their scripts: Thai and Lao, Burmese, Khmer, Tai Tham, kana and bopomofo, Han. Not Tibetan, in
# which a space stands for the mark between two syllables.
_UNSPACED_LETTERS = (
    "\u0e01-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff\u1a20-\u1aaf"
    "\u3005-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U0001aff0-\U0001b16f"
    "\U00020000-\U0003ffff"
)
_SPACE_WITHIN = re.compile(f"(?<=[{_UNSPACED_LETTERS}]) (?=[{_UNSPACED_LETTERS}])")
_TATWEEL = "\N{ARABIC TATWEEL}"


def orthography(language: str) -> Orthography:
    """Return the table of a language tag, by its first part, or a general one."""
    general = ANY_LANGUAGE if separates_words(language) else UNSPACED
    return ORTHOGRAPHIES.get(primary(language), general)


def table_to_store(language: str) -> dict[str, object]:
    """Return the version and the table of a language as plain data, for checkpoints and bundles."""
    return {"version": NORMALIZER_VERSION, **asdict(orthography(language))}


def read_stored_table(stored: Any) -> tuple[int, Orthography]:
    """Invert `table_to_store`: return the version and the table.

    Raises ValueError, TypeError or KeyError for other data.
    """
    table = Orthography(**{name: stored[name] for name in stored if name != "version"})
    rewrite = {**table.rewrite}
    texts = [table.letters, table.joiners, *rewrite, *rewrite.values()]
    if type(stored["version"]) is not int or not all(isinstance(text, str) for text in texts):
        raise ValueError("a value has the wrong type")
    words = "".join(rewrite.values())
    if {*map(len, rewrite)} - {1} or {*rewrite} & {*words} or len(words) > MAX_REWRITE_LENGTH:
        # A malicious table could make gigabytes of a word: a to bbb..., b to ccc..., and so on.
        raise ValueError("`rewrite` must map single characters to short texts without them")
    return stored["version"], table


def separates_words(language: str) -> bool:
    """Return whether a language writes spaces between its words."""
    return primary(language) not in _UNSPACED


def describe_normalizer(language: str) -> str:
    """Describe the table of a language and its effect on texts, in one line."""
    name, letters = primary(language), orthography(language).letters
    table = name if name in ORTHOGRAPHIES else "all other languages"
    line = f"text table of {table}: lower case, the letters {letters or 'of every script'}"
    if not separates_words(language):
        line += f"; {name} does not separate words, so there is a CER and no WER"
    return line


def describe_dropped(characters: Mapping[str, int], language: str) -> str | None:
    """Return a note on dropped characters that may be read aloud, such as "€" and "½".

    characters: how often each one occurs in all sentences.
    """
    dropped = Counter[str]()
    for char, count in characters.items():
        is_spoken = char in _SPOKEN_PUNCTUATION or unicodedata.category(char) in _SPOKEN_CATEGORIES
        if is_spoken and not normalize(char, language):
            dropped[char] = count
    if not dropped:
        return None
    symbols = ", ".join(f"{count} {char}" for char, count in dropped.most_common(8))
    return f"normalization dropped symbols ({symbols}). Write in words those that are read aloud"


def languages_with(letters: Mapping[str, int]) -> list[str]:
    """Return the languages whose tables keep nine tenths of the letters, the best fit first.

    letters: how often each one occurs.
    """
    sort_keys: dict[str, tuple[int, int]] = {}
    for name, table in ORTHOGRAPHIES.items():
        num_kept = sum(n for letter, n in letters.items() if letter.lower() in table.letters)
        if table.letters and num_kept >= 0.9 * sum(letters.values()):
            sort_keys[name] = -num_kept, len(table.letters)
    return sorted(sort_keys, key=sort_keys.__getitem__)


def normalize(text: str, language: str, table: Orthography | None = None) -> str:
    """Write a transcript in lower case, with the letters of its language and single spaces.

    Punctuation becomes a space, except for the dots between initials and the apostrophes inside
    words of languages that write them. Between two characters of scripts without spaces, such as
    Chinese and Thai, it is removed. Digits stay. The result is in Unicode NFC, and normalizing it
    again changes nothing.

    table: replaces the table of the language; a trained model keeps its own.

    >>> normalize("It's 50% off, Mr. Wu!", "en")
    "it's 50 percent off mr wu"
    """
    table = orthography(language) if table is None else table
    text = _compose(text).translate(_SAME)
    for char, word in table.rewrite.items():
        text = text.replace(char, word)
    text = _INITIALS.sub(r"\1", text.lower())
    text = _compose(text.translate(_written(table.letters, table.joiners)))
    words = (word.strip(table.joiners) for word in _QUOTES.sub(" ", text).split())
    text = " ".join(word for word in words if word)
    return text if table.spaces else _compose(_SPACE_WITHIN.sub("", text))


def join_segments(texts: Iterable[str]) -> str:
    """Join the normalized texts of consecutive segments; skip empty ones.

    A space separates two texts, except between characters of scripts without spaces.
    """
    joined = ""
    for text in filter(None, texts):
        is_unspaced = _SPACE_WITHIN.search(f"{joined[-1:]} {text[0]}")
        joined += text if is_unspaced or not joined else f" {text}"
    return joined


class _Table(dict[int, str]):
    """A lazy table for `str.translate`, which is ten times as fast as a loop over characters."""

    def __init__(self, replacement: Callable[[str], str]) -> None:
        super().__init__()
        self._replacement = replacement

    def __missing__(self, code: int) -> str:
        self[code] = self._replacement(chr(code))
        return self[code]


def _compose(text: str) -> str:
    """Drop zero-width characters, and compose letters with the marks that follow them."""
    return unicodedata.normalize("NFC", text.translate(_WIDTHS))


@cache
def _written(letters: str, joiners: str) -> _Table:
    return _Table(partial(_write, letters=letters, joiners=joiners))


def _plain_form(char: str) -> str:
    """Return the plain form of a full-width, half-width or joined letter or a ligature."""
    if unicodedata.decomposition(char).startswith(_SAME_LETTER) or _LIGATURES.fullmatch(char):
        return unicodedata.normalize("NFKC", char)
    return char


def _is_silent(char: str) -> bool:
    """Check for soft hyphens, zero-width joiners, variation selectors, and the tatweel."""
    is_mark = char == _TATWEEL or unicodedata.category(char) in ("Cf", "Me")
    return is_mark or "VARIATION SELECTOR" in unicodedata.name(char, "")


_WIDTHS = _Table(lambda char: "" if _is_silent(char) else _plain_form(char))


def _write(char: str, letters: str, joiners: str) -> str:
    """Return the replacement of a lower-case character: itself, plain letters, "" or a space."""
    if char in joiners or char in letters or char.isdecimal():
        return char
    if char == "'":
        return ""
    if unicodedata.category(char) not in ("Ll", "Lu", "Lt", "Lm", "Lo", "Mn", "Mc", "Nl"):
        return " "
    if not letters:
        return char
    spelled = unicodedata.normalize("NFKD", _PLAIN.get(char, char))
    # Without accents of Latin, Greek and Cyrillic, but with vowel signs of other scripts.
    plain = "".join(_PLAIN.get(part, part) for part in spelled if not "\u0300" <= part <= "\u036f")
    return plain if all(part in letters for part in plain) else char
