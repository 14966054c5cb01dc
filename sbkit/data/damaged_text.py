"""Find transcripts that another program damaged: wrong encodings, lost letters, escapes, split words.

    "fÃ¼r" -> fÃ¼r for für        UTF-8, decoded as cp1252
    "þimdi" -> þ for ş            iso8859-9, decoded as cp1252
    "Ku?ier", "it 's", "one\\ntwo" -> themselves
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import permutations

import regex

from sbkit.text.languages import primary_language, script_of
from sbkit.text.normalization import TEXT_TABLES, UNSPACED_LETTERS
from sbkit.text.transcripts import undo_escapes

SINGLE_BYTE_ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258"),
    *("iso8859-2", "iso8859-5", "iso8859-7", "iso8859-9", "iso8859-15", "cp874", "koi8-r", "cp437"),
    *("cp737", "cp775", "cp850", "cp852", "cp857", "cp866", "mac-roman", "mac-cyrillic", "mac-latin2"),
)
MULTI_BYTE_ENCODINGS = ("gb18030", "big5", "cp932", "euc-jp", "cp949")
# Letters beyond ASCII of languages that are written in Latin letters, without a text table.
_ACCENTED = {
    **{"cs": "áčďéěíňóřšťúůýž", "sk": "áäčďéíĺľňóôŕšťúýž", "hu": "áéíóöőúüű", "ro": "ăâîșşțţ"},
    **{"hr": "čćđšž", "bs": "čćđšž", "sl": "čšž", "lt": "ąčęėįšųūž", "lv": "āčēģīķļņšūž"},
    **{"et": "äöõüšž", "fi": "äöå", "sv": "åäöé", "da": "æøåé", "no": "æøåé", "nb": "æøåé"},
    **{"nn": "æøåé", "is": "áðéíóúýþæö", "tr": "çğıöşüâ", "az": "çəğıöşü", "sq": "çë"},
}
_MARKS = {*"“”‘’‚„–—…€«»¿¡°·´§№\u00a0\ufffd"}
MIN_FREQUENT_SHARE, MAX_FREQUENT_SHARE = 0.6, 0.45  # of letters among a language's ten commonest
MIN_REPAIRED_SHARE = 0.9  # of the characters that another encoding changes
MIN_REPAIRED_LETTERS = 2  # different ones
MIN_DAMAGED_SHARE = 0.05  # of transcripts, for an encoding that only their letters tell

_ISOLATED = re.compile(r"(?<![^\x00-\x7f])[^\x00-\x7f](?![^\x00-\x7f])")
_LOST_LETTERS = regex.compile(
    rf"(?V1)(?<![\w=/&.?])[\p{{L}}\p{{M}}'’-]*"
    rf"(?:[\p{{Ll}}\p{{M}}]\?+(?=[\p{{Ll}}])|\p{{Lu}}\?+(?=\p{{Lu}})"
    rf"|[[\p{{Lo}}\p{{M}}]--[{UNSPACED_LETTERS}]]\?+(?=[\p{{Lo}}--[{UNSPACED_LETTERS}]]))"
    r"[\p{L}\p{M}'’?-]*(?![\w=/&])"
)
_DAMAGE = regex.compile(
    r"[\w'’-]*(?:[\ufffd\x1a]|(?<=[^\W\d_])[¿□■](?=[^\W\d_]))[\w'’\ufffd-]*"  # lost letters
    r"|(?<!\S)\?{2,}(?: \?+)+(?!\S)"
    # Escapes of C and JSON, of LaTeX, HTML, addresses, e-mail and Excel.
    r"|\\\w|(?<=\w)\\[\"`^~](?=\w)|&(?:amp|quot|apos|nbsp|lt|gt|\#\d{2,5})(?![\w;])"
    r"|& (?:amp|quot|apos|nbsp|lt|gt|\#\d{2,5}) ;|(?:%[\dA-F]{2}){2,}"
    r"|(?<=[^\W\d_])%[\dA-F]{2}(?=[^\W\d_])|(?:=[\dA-F]{2}){2,}|_x[\dA-F]{4}_"
    # Marks of subword-nmt, WordPiece, sentencepiece, BPE, the .ltr files of fairseq, and ESPnet;
    # of GPT-2, Moses and the Penn Treebank.
    r"|(?<=\w)@@(?!\S)|(?<!\S)\#\#(?=\w)|\u2581|(?<!\S)(?:\w ){2,}\|(?!\S)|</w>|<(?i:space)>"
    r"|(?<=[a-z])[ĠĊ]|@[-,./]@|-[LR][RSC]B-"
)
_SPLIT_WORDS = {  # by language
    "en": regex.compile(r"(?i)\w+ (?:n['’]t|['’](?:s|m|re|ve|ll|d))(?![\w'’])"),
    **dict.fromkeys(
        ("fr", "it", "ca"),
        regex.compile(r"(?i)(?<![\w'’])(?:[cdjlmnst]|qu|[dsn]ell|all|un|quell)['’] [aeiouhàâéèêîôù]\w*"),
    ),
}


def find_damage(text: str, trained: str, language: str) -> Iterator[str]:
    """Yield the damaged parts of a transcript, but those that normalization undoes.

    trained: the normalized transcript; marks that it keeps are no lost letters.
    """
    text = undo_escapes(text)
    if "?" not in trained:
        yield from _LOST_LETTERS.findall(text)
    yield from _DAMAGE.findall(text)
    if split_words := _SPLIT_WORDS.get(primary_language(language)):
        yield from split_words.findall(text)


def find_misread_utf8(text: str, language: str) -> str | None:
    """Return the first damaged word of UTF-8 that was decoded as something else, with its repair.

    >>> find_misread_utf8("fÃ¼r Sie", "de"), find_misread_utf8("für Sie", "de")
    ('fÃ¼r for für', None)
    """
    repaired = text
    while (better := _read_as_utf8(repaired, language)) is not None:
        repaired = better
    pairs = zip(text.split(), repaired.split(), strict=False)
    return next((f"{word} for {right}" for word, right in pairs if word != right), None)


def find_misread_letters(
    characters: Mapping[str, int], num_texts: int, language: str
) -> dict[str, int]:
    """Return letters of one legacy encoding that was read as another, and their counts.

    characters: counted in all transcripts. It takes a language with a known alphabet.

    >>> find_misread_letters(Counter("þimdi çaðrý güle"), 2, "tr")
    {'þ for ş': 1, 'ð for ğ': 1, 'ý for ı': 1}
    """
    alphabet = alphabet_of(language)
    accented = {char for char in alphabet if char > "\x7f"}
    counts = {char: n for char, n in characters.items() if char > "\x7f" and char not in _MARKS}
    if not accented or sum(counts.values()) < MIN_DAMAGED_SHARE * num_texts:
        return {}
    is_latin = scripts_of(alphabet) == {"LATIN"}
    if not is_latin and _frequent_share(counts, language) > MAX_FREQUENT_SHARE:
        return {}
    if is_latin and not {char.lower() for char in counts} - accented:
        return {}
    best: tuple[float, dict[str, str]] = (0.0, {})
    for read_as, written_as in permutations(SINGLE_BYTE_ENCODINGS, 2):
        repairs = _repairs(counts, read_as, written_as)
        if len(repairs) < MIN_REPAIRED_LETTERS:
            continue
        if is_latin:
            score = _score_latin(counts, repairs, accented)
        else:
            repaired = Counter[str]()
            for char, count in counts.items():
                repaired[repairs.get(char, char)] += count
            score = _frequent_share(repaired, language)
        best = max(best, (score, repairs), key=lambda item: item[0])
    score, repairs = best
    if score < (MIN_REPAIRED_SHARE if is_latin else MIN_FREQUENT_SHARE):
        return {}
    return {f"{char} for {right}": counts[char] for char, right in repairs.items()}


@cache
def alphabet_of(language: str) -> frozenset[str]:
    """Return frequent letters of a language, all that are beyond ASCII; none if it is unknown."""
    code = primary_language(language)
    table = TEXT_TABLES.get(code)
    letters = (table.letters if table else "") or _ACCENTED.get(code, "")
    return frozenset(letters) | frozenset(_frequent_letters(code))


@cache
def _frequent_letters(code: str) -> tuple[str, ...]:
    from charset_normalizer.constant import FREQUENCIES  # a server has no such package

    from sbkit.text.languages import language_code

    names = [name for name in FREQUENCIES if language_code(name.strip("—")) == code]
    return tuple(char for name in names for char in FREQUENCIES[name])


def scripts_of(letters: frozenset[str]) -> set[str]:
    return {script_of(letter) for letter in letters}


def _frequent_share(counts: Mapping[str, int], language: str) -> float:
    """Return the share of letters that are among the ten most frequent ones of a language."""
    frequent = {*_frequent_letters(primary_language(language))[:10]}
    total = sum(n for char, n in counts.items() if char.isalpha() or char not in _MARKS)
    return sum(n for char, n in counts.items() if char.lower() in frequent) / max(1, total)


def _score_latin(
    counts: Mapping[str, int], repairs: Mapping[str, str], accented: set[str]
) -> float:
    """Return the share of odd characters that become letters of the language; 0 if others change."""
    odd = sum(n for char, n in counts.items() if char.lower() not in accented)
    broken = sum(counts[char] for char in repairs if char.lower() in accented)
    repaired = {char for char, right in repairs.items() if right.lower() in accented}
    repaired = {char for char in repaired if char.lower() not in accented}
    if broken or len(repaired) < MIN_REPAIRED_LETTERS:
        return 0.0
    return sum(counts[char] for char in repaired) / odd


def _repairs(counts: Mapping[str, int], read_as: str, written_as: str) -> dict[str, str]:
    """Return the characters that were others in the encoding they were written in."""
    table = _table(read_as, written_as)
    return {char: table[char] for char in counts if table.get(char, char) != char}


@cache
def _table(read_as: str, written_as: str) -> dict[str, str]:
    codes = bytes(range(128, 256))
    pairs = zip(
        codes.decode(read_as, "replace"), codes.decode(written_as, "replace"), strict=True
    )
    return {char: right for char, right in pairs if "\ufffd" not in (char, right)}


@cache
def _high_characters() -> frozenset[str]:
    codes = bytes(range(128, 256))
    decoded = "".join(codes.decode(name, "replace") for name in SINGLE_BYTE_ENCODINGS)
    return frozenset(decoded) | frozenset(map(chr, range(128, 160)))


def _read_as_utf8(text: str, language: str) -> str | None:
    """Return what a text in UTF-8 was before it was decoded as something else, if it was."""
    high = {char for char in text if char > "\x7f"}
    encodings: tuple[str, ...] = ()
    if high and high <= _high_characters() and not _ISOLATED.search(text.replace("Ã ", "Ã\xa0")):
        encodings = SINGLE_BYTE_ENCODINGS
    if high and alphabet_of(language):
        encodings = (*encodings, *MULTI_BYTE_ENCODINGS)
    for encoding in encodings:
        try:
            # A no-break space is often made a space.
            repaired = _encode(text, encoding).replace(b"\xc3 ", b"\xc3\xa0").decode()
        except UnicodeError:
            continue
        if _is_plausible(repaired, language):
            return repaired
    return None


def _encode(text: str, encoding: str) -> bytes:
    """Encode a text; control characters stand for bytes that an encoding does not define."""
    try:
        return text.encode(encoding)
    except UnicodeEncodeError:
        is_control = [128 <= ord(char) < 160 for char in text]
        parts = zip(text, is_control, strict=True)
        return b"".join(bytes([ord(c)]) if control else c.encode(encoding) for c, control in parts)


def _is_plausible(text: str, language: str) -> bool:
    """Return whether the characters beyond ASCII are marks or letters that the language may use."""
    scripts = scripts_of(alphabet_of(language))
    letters = [char for char in text if char > "\x7f" and char.isalpha()]
    if not letters:
        return all(char in _MARKS for char in text if char > "\x7f")
    if scripts and scripts != {"LATIN"}:
        return all(script_of(char) in scripts for char in letters)
    is_phonetic = ["\u0250" <= char <= "\u02ff" for char in letters]
    return not all(is_phonetic) and (not scripts or all(script_of(c) == "LATIN" for c in letters))
