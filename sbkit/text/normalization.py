"""Normalize transcripts, with a table for each language.

Letters are never dropped. A letter that a language does not use is replaced by its plain letters
("café" in English: "cafe"), or kept if it has none. The key `text` of a YAML makes a table that
keeps capitals and marks of punctuation (`text_table`).
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import regex

from sbkit.base.errors import ConfigError, concerning
from sbkit.base.files import from_plain
from sbkit.text.languages import primary_language

TEXT_VERSION = 10  # raised with each change of normalized texts
MAX_REWRITE_LENGTH = 1000  # characters of all replacements of a table

_LATIN = "abcdefghijklmnopqrstuvwxyz"
_DOTLESS_I = "\N{LATIN SMALL LETTER DOTLESS I}"
_GERESH, _GERSHAYIM = "\N{HEBREW PUNCTUATION GERESH}", "\N{HEBREW PUNCTUATION GERSHAYIM}"
_HEBREW_QUOTES = {_GERESH: "'", _GERSHAYIM: '"', "\N{RIGHT DOUBLE QUOTATION MARK}": '"'}


@dataclass(frozen=True)
class TextTable:
    """The spelling rules of a language."""

    letters: str = ""  # lower-case letters of the language; "" allows the letters of every script
    joiners: str = "'·"  # marks kept between two letters of a word; "·" between Latin ones
    # Replacements of characters before lower-casing, such as words for symbols.
    rewrite: Mapping[str, str] = field(default_factory=dict)
    # Whether words are separated by spaces, as the transcripts of train tell (`has_spaces`). If
    # not, spaces beside letters of scripts such as Chinese (UNSPACED_LETTERS) are removed.
    spaces: bool = True
    keep_case: bool = False
    punctuation: str = ""  # the marks that are kept
    numbers: str = ""  # the language in which digits become words; "" keeps digits
    starts: str = ""  # before these letters, an apostrophe at the start of a word is a letter
    ends: str = ""  # after these letters, an apostrophe at the end of a word is a letter

    @property
    def is_plain(self) -> bool:
        return not (self.keep_case or self.punctuation)

    @property
    def plain(self) -> "TextTable":
        """The table that keeps neither capitals nor punctuation."""
        return replace(self, keep_case=False, punctuation="")


_TURNED_COMMA, _MODIFIER = "\N{MODIFIER LETTER TURNED COMMA}", "\N{MODIFIER LETTER APOSTROPHE}"
_VOWELS = "aeiouáéíóúàèìòùāēīōūąęįǫåäü"
# Languages whose "I" is the capital of a dotless i; with two scripts, only in Latin letters.
_DOTLESS_I_LANGUAGES = (
    "tr az azb crh gag bgx uum zza diq kiu kaa tly ttt slr kmz qxq bdk kjj kry ota-latn ba-latn"
    " tt-latn kk-latn ky-latn kum-latn nog-latn krc-latn chg-latn ady-latn kbd-latn udi-latn"
)
# Languages where an apostrophe at the edge of a word is a letter: at its start before the first
# letters, at its end after the second ones. For uz, ha, haw, to, quc and nv they follow from the
# exemplar characters with an apostrophe in CLDR.
_EDGE_LETTERS = {
    "uz": ("", "go"),
    "mt ch so luo kln": ("", _VOWELS + "g"),  # Maltese "ta'", Somali "lo'", Dholuo "wang'"
    "ha ff fub fue fuf fuh fui fuq fuv ffm": ("y", ""),  # Fulah and its members in ISO 639-3
    "haw to sm ty rap rar wls fud": (_VOWELS, ""),
    "quc cak kek yua mam tzh tzo ctu tzj ixl kjb jac poh acr toj mop": ("", _LATIN + _VOWELS),
    "nv apw gwi tli crx": (_VOWELS, f"{_LATIN}{_VOWELS}ł\N{COMBINING ACUTE ACCENT}"),
    "ami bnn ckv dru pwn pyu sxr szy tao tay trv tsu xnb xsy": (_LATIN, _LATIN),  # of Taiwan
}

TEXT_TABLES: Mapping[str, TextTable] = {
    "en": TextTable(_LATIN, "'", {"&": " and ", "%": " percent "}),
    "es": TextTable(_LATIN + "áéíñóúü", "", {"&": " y ", "%": " por ciento "}),
    "fr": TextTable(_LATIN + "àâæçèéêëîïôùûüÿœ", "'", {"&": " et ", "%": " pour cent "}),
    "it": TextTable(_LATIN + "àèéìíîòóùú", "'", {"&": " e ", "%": " per cento "}),
    # "ё" loses its dots, because they are optional: "решётка" may be written "решетка".
    "ru": TextTable("абвгдежзийклмнопрстуфхцчшщъыьэюя", "", {"&": " и ", "%": " процентов "}),
    "de": TextTable(_LATIN + "äöüß", "'", {"&": " und ", "%": " prozent "}),
    "pt": TextTable(_LATIN + "àáâãçéêíóôõúü", "'", {"&": " e ", "%": " por cento "}),
    "nl": TextTable(_LATIN + "áèéêëíïóöúü", "'", {"&": " en ", "%": " procent "}),
    "pl": TextTable(_LATIN + "ąćęłńóśźż", "'", {"&": " i ", "%": " procent "}),
    "ca": TextTable(
        _LATIN + "àçèéíïòóúü", "'·", {"ŀ": "l·", "Ŀ": "l·", "&": " i ", "%": " per cent "}
    ),
    **dict.fromkeys(_DOTLESS_I_LANGUAGES.split(), TextTable(rewrite={"I": _DOTLESS_I})),
    # Marks of stress, question and exclamation stand on a vowel within the word: "ինչո՞ւ".
    **dict.fromkeys(("hy", "hyw"), TextTable(rewrite={"՛": "", "՜": "", "՞": ""})),
    # Their apostrophe only stands inside words, and is typed as either code.
    **dict.fromkeys(("uk", "be", "rue", "br"), TextTable(rewrite={_MODIFIER: "'"})),
    # Geresh and gershayim, or the quotes typed for them, are part of words; geresh also ends them.
    **dict.fromkeys(("he", "yi"), TextTable("", "'\"", _HEBREW_QUOTES, ends="גזצץ")),
    **{
        language: TextTable(rewrite={_TURNED_COMMA: _MODIFIER}, starts=starts, ends=ends)
        for languages, (starts, ends) in _EDGE_LETTERS.items()
        for language in languages.split()
    },
}
ANY_LANGUAGE = TextTable()
UNSPACED = TextTable(spaces=False)

APOSTROPHES = (
    "'`\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}"
    "\N{ACUTE ACCENT}\N{SINGLE HIGH-REVERSED-9 QUOTATION MARK}\N{FULLWIDTH APOSTROPHE}"
)
_UNIFIED_APOSTROPHES = str.maketrans(dict.fromkeys(APOSTROPHES, "'"))
# Marks that belong to words in some table, or that open and close a quotation alike.
_WORD_MARKS = f"{APOSTROPHES}{_MODIFIER}'\"·{_GERESH}{_GERSHAYIM}"
# A middle dot, or a mark that is typed for it, between Latin letters; and any other middle dot.
_MIDDLE_DOTS = regex.compile(r"([·•‧∙⋅])(?<=\p{Latin}\p{M}*.)(?=\p{Latin})|·")
_OPENING_MARKS = "¿¡"  # besides the categories Ps and Pi
TEXT_CHOICES = {"case": ("lower", "keep"), "numbers": ("keep", "spell")}  # in `text`
TEXT_EXAMPLE = '{case: keep, punctuation: [".", ",", "?", "!"], numbers: spell}'
# Plain letters for letters that have no Unicode decomposition.
_BASE_LETTERS = {"æ": "ae", "œ": "oe", "ß": "ss", "ø": "o", "ł": "l", "đ": "d", "ð": "d"}
_BASE_LETTERS |= {"þ": "th", "ħ": "h", _DOTLESS_I: "i"}
# The dots of "U.S.A." and "p.m.", but no dots beside apostrophes.
_INITIALS = re.compile(r"(?<!\w)([^\W\d_\u02bb\u02bc])\.(?=[^\W\d_\u02bb\u02bc](?!\w))")
_QUOTES = re.compile(r"'{2,}")
_DOUBLED = re.compile(r"(?<=[^\W_])''(?=[^\W\d_])")  # "it''s", as SQL escapes it
# How Unicode marks a form of a letter that differs from it only in width or position.
_COMPATIBILITY_TAGS = ("<wide>", "<narrow>", "<initial>", "<medial>", "<final>", "<isolated>")
_LIGATURES = re.compile("[\N{LATIN SMALL LIGATURE FF}-\N{ARMENIAN SMALL LIGATURE MEN XEH}Ĳĳ]")
# Punctuation that is often read aloud, like all symbols and numbers ("€", "№", "½").
_SPOKEN_PUNCTUATION = "%&@#§‰٪*/"
_SPOKEN_CATEGORIES = ("Sc", "Sm", "So", "No")
_CHINESE_LANGUAGES = {"zh", "yue", "nan", "wuu", "gan", "hsn", "lzh"}
# Languages without spaces between words, for a model that comes without transcripts of train.
_UNSPACED = _CHINESE_LANGUAGES | {"ja", "th", "lo", "km", "my", "shn", "nod", "bo", "dz"}
# The letters of their scripts: Thai and Lao, Burmese, Khmer, Tai Tham, kana and bopomofo, Han.
# Tibetan is left out: it marks the end of each syllable, and normalization turns these marks into
# spaces, which must stay.
_SOUTHEAST_ASIAN_LETTERS = (
    "\u0e01-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff\u1a20-\u1aaf"
)
UNSPACED_LETTERS = (
    f"{_SOUTHEAST_ASIAN_LETTERS}\u3005-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U0001aff0-\U0001b16f"
    "\U00020000-\U0003ffff"
)
_UNSPACED_MARKS = "\u3001\u3002\uff01-\uff1f"  # no space is written beside them either
_UNSPACED_CHARS = f"[{UNSPACED_LETTERS}{_UNSPACED_MARKS}]"
_UNSPACED_GAP = re.compile(f"(?<={_UNSPACED_CHARS}) | (?={_UNSPACED_CHARS})")
# A few languages in letters of Southeast Asia, such as Karen, separate words.
_SOUTHEAST_ASIAN_GAP = re.compile(
    rf"(?<=[{_SOUTHEAST_ASIAN_LETTERS}])\s+(?=[{_SOUTHEAST_ASIAN_LETTERS}])"
)
_UNSPACED_OR_TIBETAN = re.compile(f"[{UNSPACED_LETTERS}\u0f00-\u0fff]")
LETTERS_OF_WORD = 3  # a word has two letters in Chinese, and about five in scripts with spaces
MIN_SPACE_SHARE = 1 / 8  # of letters: Karen words have four letters, phrases of Thai over ten
_TATWEEL = "\N{ARABIC TATWEEL}"
_NON_JOINER, _JOINER = "\N{ZERO WIDTH NON-JOINER}", "\N{ZERO WIDTH JOINER}"
# Joiners stay where they change the letters beside them: between letters that would join, as in
# Persian, and after a virama, as in Sinhala (Unicode Standard Annex 31, "Contexts for Joiners"), or
# before one, as in Bengali (the Unicode Standard, section 12.2).
_JOINERS = regex.compile(
    rf"((?<=[\p{{jt=L}}\p{{jt=D}}]\p{{jt=T}}*){_NON_JOINER}(?=\p{{jt=T}}*[\p{{jt=R}}\p{{jt=D}}])"
    rf"|(?<=\p{{ccc=9}}){_NON_JOINER}(?=\p{{L}})"
    rf"|(?<=\p{{ccc=9}}){_JOINER}|(?<=\p{{L}}){_JOINER}(?=\p{{ccc=9}}))"
    rf"|[{_NON_JOINER}{_JOINER}]"
)


def language_table(language: str) -> TextTable:
    """Return the table of a tag's language, or a general one."""
    general = ANY_LANGUAGE if separates_words(language) else UNSPACED
    with_script = "-".join(re.split("[-_]", language.strip().lower())[:2])
    return TEXT_TABLES.get(with_script) or TEXT_TABLES.get(primary_language(language), general)


@concerning("text")
def text_table(language: str, settings: object = None) -> TextTable:
    """Return the table of a language with the case and punctuation that the key `text` keeps."""
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping) or {*settings} - {"punctuation", *TEXT_CHOICES}:
        raise ConfigError(f"`text` must be a mapping such as {TEXT_EXAMPLE}, but is {settings!r}.")
    choices = {key: settings.get(key, values[0]) for key, values in TEXT_CHOICES.items()}
    for key, choice in choices.items():
        if choice not in TEXT_CHOICES[key]:
            allowed = " or ".join(TEXT_CHOICES[key])
            raise ConfigError(f"`text.{key}` must be {allowed}, but is {choice!r}.")
    marks = settings.get("punctuation") or []
    are_texts = isinstance(marks, list) and all(isinstance(mark, str) for mark in marks)
    if not are_texts or not all(len(mark) == 1 and is_mark(mark) for mark in marks):
        raise ConfigError(
            "`text.punctuation` must list marks that do not belong to words, such as "
            f'[".", ","], but is {marks!r}.'
        )
    return replace(
        language_table(language),
        keep_case=choices["case"] == "keep",
        punctuation="".join(marks),
        numbers=primary_language(language) if choices["numbers"] == "spell" else "",
    )


def is_mark(char: str) -> bool:
    """Return whether a character is punctuation that a table can keep; apostrophes are not."""
    return unicodedata.category(char).startswith("P") and char not in _WORD_MARKS


def table_to_store(table: TextTable) -> dict[str, object]:
    """Return a table and its version as plain data, for checkpoints and bundles."""
    return {"version": TEXT_VERSION, **asdict(table)}


def table_from_stored(stored: Any) -> TextTable:
    """Read a stored table; raise ValueError, TypeError or KeyError for other data."""
    if type(stored["version"]) is not int:
        raise ValueError("its version has the wrong type")
    table = from_plain(TextTable, {name: stored[name] for name in stored if name != "version"})
    if not all(map(is_mark, table.punctuation)):
        raise ValueError("`punctuation` must be marks of punctuation")
    # A malicious table could turn a word into gigabytes: a to bbb..., b to ccc..., and so on.
    replacements = "".join(table.rewrite.values())
    has_other_keys = any(len(key) != 1 for key in table.rewrite)
    is_repeated = any(key in replacements for key in table.rewrite)
    is_too_long = len(replacements) > MAX_REWRITE_LENGTH
    if has_other_keys or is_repeated or is_too_long:
        raise ValueError(
            "`rewrite` must map single characters to texts that contain none of them and have at "
            f"most {MAX_REWRITE_LENGTH} characters in total"
        )
    return table


def separates_words(language: str) -> bool:
    """Return whether a language is known to write spaces between its words."""
    return primary_language(language) not in _UNSPACED


def has_spaces(characters: Mapping[str, int], num_gaps: int) -> bool:
    """Return whether transcripts have spaces between words, by their counted characters.

    num_gaps: what `count_gaps` counted in them.
    """
    unspaced = sum(n for char, n in characters.items() if _UNSPACED_OR_TIBETAN.match(char))
    letters = sum(n for char, n in characters.items() if char.isalpha())
    is_unspaced = LETTERS_OF_WORD * unspaced > letters - unspaced
    return not is_unspaced or num_gaps > MIN_SPACE_SHARE * unspaced


def count_gaps(text: str) -> int:
    """Count spaces between letters of scripts where only some languages separate words."""
    return len(_SOUTHEAST_ASIAN_GAP.findall(text))


def describe_normalizer(language: str, table: TextTable) -> str:
    """Describe the text table of a language in one line."""
    code = primary_language(language)
    is_own = language_table(language) not in (ANY_LANGUAGE, UNSPACED)
    name = code if is_own else "all other languages"
    case = "upper and lower case" if table.keep_case else "lower case"
    line = f"text table of {name}: {case}, the letters {table.letters or 'of every script'}"
    if table.numbers:
        line += ", numbers as words"
    if table.punctuation:
        line += f", the marks {' '.join(table.punctuation)}"
    if not table.spaces:
        line += "; its transcripts do not separate words, so there is a CER and no WER"
    return line


def is_spoken_symbol(char: str) -> bool:
    """Return whether a character is often read aloud, such as "€" and "½"."""
    return char in _SPOKEN_PUNCTUATION or unicodedata.category(char) in _SPOKEN_CATEGORIES


def languages_with(letters: Mapping[str, int]) -> list[str]:
    """Return the languages whose tables keep nine tenths of counted letters, the best one first."""
    matches: list[tuple[int, int, str]] = []
    for language, table in TEXT_TABLES.items():
        num_kept = sum(n for letter, n in letters.items() if letter.lower() in table.letters)
        if num_kept > 0 and num_kept >= 0.9 * sum(letters.values()):
            matches.append((-num_kept, len(table.letters), language))
    matches.sort(key=lambda match: match[:2])  # most letters kept first, then the shortest table
    return [language for _, _, language in matches]


def normalize(text: str, language: str, table: TextTable | None = None) -> str:
    """Write a transcript in lower case, with the letters of its language and single spaces.

    Punctuation becomes a space, except for dots between initials and apostrophes inside words.
    Beside characters of scripts without spaces, such as Chinese, it is removed. Digits stay.
    The result is in Unicode NFC, and normalizing it again changes nothing. A result with case or
    marks becomes, by the plain table, the same text as the transcript does.

    table: replaces the table of the language; a trained model keeps the one it was trained with.

    >>> normalize("It's 50% off, Mr. Wu!", "en")
    "it's 50 percent off mr wu"
    """
    if table is None:
        table = language_table(language)
    marks = table.punctuation
    # 1. Fold widths first, so that every later stage meets one form of each character.
    text = compose(text, marks)
    # 2. Unify apostrophes, which tables name in one form. Lower-casing would turn "İ" into "i" and
    #    a combining dot.
    text = text.translate(_UNIFIED_APOSTROPHES)
    if "·" in table.joiners:
        text = _MIDDLE_DOTS.sub(lambda dot: "·" if dot[1] else " ", text)
    if table.letters:  # which never contain the modifier letter
        text = text.replace(_MODIFIER, "'")
    if not table.keep_case:
        text = text.replace("İ", "i")
    # 3. Rewrite symbols while letters have their case: Turkish "I" is not the capital of "i".
    for char, replacement in table.rewrite.items():
        if char not in marks:
            is_capital = table.keep_case and char.isupper()
            text = text.replace(char, _capitalize(replacement) if is_capital else replacement)
    # 4. Lower the case, because tables only have lower-case letters.
    if not table.keep_case:
        text = text.lower()
    # 5. Join initials before the next stage turns their dots into spaces.
    if "." not in marks:
        text = _INITIALS.sub(r"\1", text)
    # 6. Fold letters, and turn punctuation into spaces. This may leave marks to compose.
    folding = _letter_folding(table.letters, table.joiners, table.keep_case, marks)
    text = compose(text.translate(folding), marks)
    # 7. Trim joiners now that all words are separated: inside a word they stay.
    text = _DOUBLED.sub('"' if '"' in table.joiners else "'", text)
    words = _QUOTES.sub(" ", text).split()
    trim = partial(_trim, table=table)
    text = " ".join(attach_marks(words, marks, trim) if marks else filter(None, map(trim, words)))
    if table.spaces:
        return text
    # 8. Without a space between them, a letter and a mark may compose.
    return compose(_UNSPACED_GAP.sub("", text), marks)


def _trim(word: str, table: TextTable) -> str:
    """Drop joiners and quotation marks around a word, but no apostrophe that is a letter."""
    core = word.strip(table.joiners + _MODIFIER)
    if not core or core == word.replace(_MODIFIER, "'"):
        return core
    edges = word.split(core)
    are_letters = core[0].lower() in table.starts, core[-1].lower() in table.ends
    is_quoted = all("'" in marks for marks in edges) and not all(are_letters)
    for side, marks in enumerate(edges):
        # Unicode says that the modifier is a letter of any language.
        edges[side] = _MODIFIER if _MODIFIER in marks else ""
        if are_letters[side] and (edges[side] or ("'" in marks and not is_quoted)):
            edges[side] = "'"
    # Languages whose apostrophe is a letter at some edges write it as "'" inside words, too.
    letter = "'" if table.starts or table.ends else _MODIFIER
    core = re.sub(f"['{_MODIFIER}]*{_MODIFIER}['{_MODIFIER}]*", letter, core)
    return core.join(edges)


def attach_marks(
    words: Iterable[str], punctuation: str, trim: Callable[[str], str] = str
) -> list[str]:
    """Attach marks without letters to a word: opening marks to the next word, others to the last.

    At the end of a word, a repeated mark is written once ("wait..." becomes "wait.").

    >>> attach_marks([".", "Wait", "..", "please", "?"], ".?")
    ['Wait.', 'please?']
    """
    marks = f"[{re.escape(punctuation)}]"
    marked_words: list[str] = []
    opening = ""
    for word in words:
        parts = [trim(part) for part in re.split(f"({marks})", word)]
        word = "".join(parts)
        if any(parts[::2]):  # the letters between the marks
            marked_words.append(opening + word)
            opening = ""
        elif all(c in _OPENING_MARKS or unicodedata.category(c) in ("Ps", "Pi") for c in word):
            opening += word
        elif marked_words:
            marked_words[-1] += word
    return [re.sub(f"({marks})\\1+(?={marks}*$)", r"\1", word) for word in marked_words]


def join_segments(texts: Iterable[str]) -> str:
    """Join the normalized texts of consecutive segments, with spaces if their scripts have them."""
    joined = ""
    for text in texts:
        if not text:
            continue
        is_unspaced = _UNSPACED_GAP.search(f"{joined[-1:]} {text[0]}")
        if joined and not is_unspaced:
            joined += " "
        joined += text
    return joined


class _LazyTranslation(dict[int, str]):
    """A table for `str.translate` that is filled as needed; ten times as fast as a loop."""

    def __init__(self, replacement: Callable[[str], str]) -> None:
        super().__init__()
        self._replacement = replacement

    def __missing__(self, code: int) -> str:
        self[code] = self._replacement(chr(code))
        return self[code]


def compose(text: str, kept_marks: str = "") -> str:
    """Drop silent characters, unify widths, and compose letters with their marks.

    kept_marks: characters that keep their width, such as the marks of Chinese.
    """
    if _NON_JOINER in text or _JOINER in text:
        text = _JOINERS.sub(r"\1", text)
    return unicodedata.normalize("NFC", text.translate(_width_folding(kept_marks)))


def _fold_width(char: str) -> str:
    """Return a character in its usual width and position; "" for a silent one (soft hyphen)."""
    is_format = unicodedata.category(char) in ("Cf", "Me") and char not in (_NON_JOINER, _JOINER)
    is_silent = is_format or char == _TATWEEL
    if is_silent or "VARIATION SELECTOR" in unicodedata.name(char, ""):
        return ""
    has_usual_form = unicodedata.decomposition(char).startswith(_COMPATIBILITY_TAGS)
    if has_usual_form or _LIGATURES.fullmatch(char):
        return unicodedata.normalize("NFKC", char)
    return char


@cache
def _width_folding(kept_marks: str) -> _LazyTranslation:
    return _LazyTranslation(lambda char: char if char in kept_marks else _fold_width(char))


@cache
def _letter_folding(
    letters: str, joiners: str, keep_case: bool, kept_marks: str
) -> _LazyTranslation:
    fold = partial(_fold_cased if keep_case else _fold_letter, letters=letters, joiners=joiners)
    return _LazyTranslation(lambda char: char if char in kept_marks else fold(char))


def _fold_cased(char: str, letters: str, joiners: str) -> str:
    """Return the replacement of a character, capitalized in place of a capital letter."""
    lower = "i" if char == "İ" else char.lower()
    folded = _fold_letter(lower, letters, joiners)
    if lower == char:
        return folded
    is_kept = folded == char.lower() or (folded == lower and not letters)
    return char if is_kept else _capitalize(folded)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fold_letter(char: str, letters: str, joiners: str) -> str:
    """Return the replacement of a lower-case character: itself, plain letters, "" or a space."""
    if char in joiners or char in letters or char.isdecimal() or char in (_NON_JOINER, _JOINER):
        return char
    if char == "'":
        return ""
    is_letter = unicodedata.category(char) in ("Ll", "Lu", "Lt", "Lm", "Lo", "Mn", "Mc", "Nl")
    if not (is_letter or unicodedata.name(char, "").startswith("MODIFIER LETTER")):  # for tones
        return " "
    if not letters:
        return char
    parts = unicodedata.normalize("NFKD", _BASE_LETTERS.get(char, char))
    # Drop accents of Latin, Greek and Cyrillic, but keep vowel signs of other scripts.
    unaccented = [part for part in parts if not "\u0300" <= part <= "\u036f"]
    plain = "".join(_BASE_LETTERS.get(part, part) for part in unaccented)
    if all(letter in letters for letter in plain):
        return plain
    return char
