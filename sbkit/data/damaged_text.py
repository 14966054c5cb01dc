"""Find transcripts that another program damaged.

Encodings: "fÃ¼r" is UTF-8 that was decoded as cp1252; "þimdi" is iso8859-9 that was.
Lost letters: "Ku?ier". Escapes: "one%20two". Split words: "it 's", "hel@@ lo".
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import permutations, product

import regex

from sbkit.text.languages import primary_language, script_of
from sbkit.text.normalization import TEXT_TABLES, UNSPACED_LETTERS
from sbkit.text.transcripts import undo_escapes

SINGLE_BYTE_ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258"),
    *("iso8859-2", "iso8859-5", "iso8859-7", "iso8859-9", "iso8859-15", "cp874", "koi8-r", "cp437"),
    *("cp737", "cp775", "cp850", "cp852", "cp857", "cp866", "mac-roman", "mac-cyrillic"),
    "mac-latin2",
)
MULTI_BYTE_ENCODINGS = ("gb18030", "big5", "cp932", "euc-jp", "cp949")
EAST_ASIAN_LANGUAGES = ("zh", "ja", "ko")
# Letters beyond ASCII of languages that are written in Latin letters, without a text table.
_ACCENTED = {
    **{"cs": "áčďéěíňóřšťúůýž", "sk": "áäčďéíĺľňóôŕšťúýž", "hu": "áéíóöőúüű", "ro": "ăâîșşțţ"},
    **{"hr": "čćđšž", "bs": "čćđšž", "sl": "čšž", "lt": "ąčęėįšųūž", "lv": "āčēģīķļņšūž"},
    **{"et": "äöõüšž", "fi": "äöå", "sv": "åäöé", "tr": "çğıöşüâ", "az": "çəğıöşü", "sq": "çë"},
    **dict.fromkeys(("da", "no", "nb", "nn"), "æøåé"),
    "is": "áðéíóúýþæö",
}
_MARKS = {*"\u201c\u201d\u2018\u2019\u201a\u201e\u2013\u2014…€«»¿¡°·\u00b4§№\u00a0\ufffd"}
MIN_REPAIRED_SHARE = 0.9  # of the characters that another encoding changes
MIN_REPAIRED_LETTERS = 2  # different ones
MIN_LONG_LETTERS = 3  # of scripts with three bytes for a letter in UTF-8
MIN_DAMAGED_SHARE = 0.05  # of transcripts, for an encoding that only their letters tell

_ISOLATED = re.compile(r"(?<![^\x00-\x7f])[^\x00-\x7f](?![^\x00-\x7f])")
_LOST_LETTERS = regex.compile(
    rf"(?V1)(?<![\w=/&.?])[\p{{L}}\p{{M}}'\u2019-]*"
    rf"(?:[\p{{Ll}}\p{{M}}]\?+(?=\p{{Ll}})|\p{{Lu}}\?+(?=\p{{Lu}})"
    rf"|[[\p{{Lo}}\p{{M}}]--[{UNSPACED_LETTERS}]]\?+(?=[\p{{Lo}}--[{UNSPACED_LETTERS}]]))"
    r"[\p{L}\p{M}'\u2019?-]*(?![\w=/&])"
)
_DAMAGE = regex.compile(
    # Lost letters, and words of which all letters are lost.
    r"(?<![\w'\u2019-])[\w'\u2019-]*(?:[\ufffd\x1a]|(?<=[^\W\d_])[¿□■](?=[^\W\d_]))[\w'\u2019\ufffd-]*"
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
_MAY_BE_DAMAGED = re.compile(r"[^\w\s.,;:!'\"\u2019-]|[_ĠĊ\x1a]|\?\?|-[LR][RSC]B-")  # much faster
_APOSTROPHE_AT_SPACE = re.compile(r" n?['\u2019]|['\u2019] ")
_SPLIT_WORDS = {  # by language
    "en": regex.compile(r"(?i)\w+ (?:n['\u2019]t|['\u2019](?:s|m|re|ve|ll|d))(?![\w'\u2019])"),
    **dict.fromkeys(
        ("fr", "it", "ca"),
        regex.compile(
            r"(?i)(?<![\w'\u2019])(?:[cdjlmnst]|qu|[dsn]ell|all|un|quell)['\u2019] "
            r"[aeiouhàâéèêîôù]\w*"
        ),
    ),
}


def find_damage(text: str, trained: str, language: str) -> Iterator[str]:
    """Yield the damaged parts of a transcript, but those that normalization undoes.

    trained: the normalized transcript; marks that it keeps are no lost letters.
    """
    text = undo_escapes(text)
    if "?" in text and "?" not in trained:
        yield from _LOST_LETTERS.findall(text)
    if _MAY_BE_DAMAGED.search(text):
        yield from _DAMAGE.findall(text)
    if _APOSTROPHE_AT_SPACE.search(text) and (
        words := _SPLIT_WORDS.get(primary_language(language))
    ):
        yield from words.findall(text)


def find_misread_word(text: str, language: str) -> str | None:
    """Return the first word that was decoded in another encoding than its own, with its repair.

    >>> find_misread_word("fÃ¼r Sie", "de"), find_misread_word("für Sie", "de")
    ('fÃ¼r for für', None)
    """
    repaired = text
    while (better := _read_again(repaired, language)) is not None:
        repaired = better
    pairs = zip(text.split(), repaired.split(), strict=False)
    return next((f"{word} for {right}" for word, right in pairs if word != right), None)


def find_misread_letters(
    characters: Mapping[str, int], num_texts: int, language: str
) -> dict[str, int]:
    """Return letters of one single-byte encoding that were read as another one, and their counts.

    characters: counted in all transcripts. It takes a language with a known alphabet.

    >>> find_misread_letters(Counter("þimdi teþekkür güle çaðdaþ"), 3, "tr")
    {'þ for ş': 3, 'ð for ğ': 1}
    """
    alphabet = alphabet_of(language)
    counts = {char: n for char, n in characters.items() if char > "\x7f" and char not in _MARKS}
    score = _score_letters
    if scripts_of(alphabet) == {"LATIN"}:
        score = _score_accents
    elif sum(n for char, n in characters.items() if char.isascii() and char.isalpha()) > sum(
        counts.values()
    ):
        return {}  # another script than the usual one, in Latin letters
    best, repairs = 0.0, dict[str, str]()
    for read_as, written_as in permutations(SINGLE_BYTE_ENCODINGS, 2) if alphabet else ():
        table = _table(read_as, written_as)
        changed = {char: table[char] for char in counts if table.get(char, char) != char}
        num_changed = sum(counts[char] for char in changed)
        if len(changed) >= MIN_REPAIRED_LETTERS and num_changed >= MIN_DAMAGED_SHARE * num_texts:
            gain = score(counts, changed, language)
            if gain > best:
                best, repairs = gain, changed
    return {f"{char} for {right}": counts[char] for char, right in repairs.items()}


def _score_accents(counts: Mapping[str, int], repairs: Mapping[str, str], language: str) -> float:
    """Return the share of odd characters that become accented letters of a Latin alphabet, or 0."""
    accented = {char for char in alphabet_of(language) if char > "\x7f"}
    repaired = {
        char
        for char, right in repairs.items()
        if char not in accented
        and (right.lower() in accented or (right in "¿¡" and char.lower() not in accented))
    }
    num_repaired = sum(counts[char] for char in repaired)
    num_broken = sum(counts[char] for char in repairs if char in accented)
    num_odd = sum(counts[c] for c in counts if c.lower() not in accented or c in repaired)
    is_repair = len(repaired) >= MIN_REPAIRED_LETTERS and num_broken < num_repaired / 20
    # Names have letters of other languages; what was read in another encoding lacks its own.
    right = {f(repairs[char]) for char in repaired for f in (str.lower, str.upper)} - {*"¿¡"}
    is_repair &= sum(counts.get(char, 0) for char in right) <= num_repaired
    share = num_repaired / max(1, num_odd)
    return share if is_repair and share >= MIN_REPAIRED_SHARE else 0.0


def _score_letters(counts: Mapping[str, int], repairs: Mapping[str, str], language: str) -> float:
    """Return the share of frequent letters of the language if it grows by much, or else 0."""
    repaired = Counter[str]()
    for char, count in counts.items():
        repaired[repairs.get(char, char)] += count
    (script, frequent), (script_after, frequent_after) = (
        _shares(characters, language) for characters in (counts, repaired)
    )
    if script < 1 / 2:
        return script_after + frequent_after if script_after >= MIN_REPAIRED_SHARE else 0.0
    is_repair = frequent_after > max(1 / 2, frequent + 1 / 5)
    return frequent_after if is_repair else 0.0


def _shares(characters: Mapping[str, int], language: str) -> tuple[float, float]:
    """Return the shares of a language's script, and of its ten most frequent letters."""
    scripts = scripts_of(alphabet_of(language))
    frequent = {*_frequent_letters(primary_language(language))[:10]}
    total = max(1, sum(characters.values()))
    in_script = sum(n for char, n in characters.items() if script_of(char) in scripts)
    return in_script / total, sum(
        characters.get(c, 0) + characters.get(c.upper(), 0) * (c.upper() != c) for c in frequent
    ) / total


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
    """Return the first words of the names of letters, such as LATIN."""
    return {script_of(letter) for letter in letters}


@cache
def _table(read_as: str, written_as: str) -> dict[str, str]:
    codes = bytes(range(128, 256))
    pairs = zip(codes.decode(read_as, "replace"), codes.decode(written_as, "replace"), strict=True)
    return {char: right for char, right in pairs if "\ufffd" not in (char, right)}


@cache
def _high_characters() -> frozenset[str]:
    codes = bytes(range(128, 256))
    decoded = "".join(codes.decode(name, "replace") for name in SINGLE_BYTE_ENCODINGS)
    return frozenset(decoded) | frozenset(map(chr, range(128, 160)))


def _read_again(text: str, language: str) -> str | None:
    """Return what a text was before it was decoded in another encoding than its own, if it was.

    Besides UTF-8, it may have been in a multi-byte encoding of East Asia.
    """
    high = [char for char in text if char > "\x7f"]
    if not high:
        return None
    is_single_byte = _high_characters().issuperset(high)
    is_east_asian = primary_language(language) in EAST_ASIAN_LANGUAGES
    pairs: list[tuple[str, str]] = []
    if is_single_byte and not _ISOLATED.search(text.replace("Ã ", "Ã\xa0")):
        pairs += ((read_as, "utf-8") for read_as in SINGLE_BYTE_ENCODINGS)
    if alphabet_of(language) and not is_single_byte:
        pairs += ((read_as, "utf-8") for read_as in MULTI_BYTE_ENCODINGS)
    if is_single_byte and 2 * len(high) > len(text) and is_east_asian:
        pairs += product(SINGLE_BYTE_ENCODINGS, MULTI_BYTE_ENCODINGS)
    codes = {*map(ord, high)}
    for read_as, written_as in pairs:
        try:
            # A no-break space is often made a space.
            data = _encode(text, read_as, codes).replace(b"\xc3 ", b"\xc3\xa0")
            repaired = data.decode(written_as)
        except UnicodeError:
            continue
        if repaired != text and _is_plausible(repaired, text, language):
            return repaired
    return None


def _encode(text: str, encoding: str, high: set[int]) -> bytes:
    """Encode a text; control characters stand for bytes that an encoding does not define."""
    if encoding in MULTI_BYTE_ENCODINGS:
        return text.encode(encoding)
    codes = _codes(encoding)
    if not codes.keys() >= high:
        raise UnicodeError
    return text.translate(codes).encode("latin-1")


@cache
def _codes(encoding: str) -> dict[int, str]:
    """Return characters of Latin-1 for the bytes that an encoding has for its characters."""
    codes = {code: chr(code) for code in range(128, 160)}
    for code in range(128, 256):
        with suppress(UnicodeDecodeError):
            codes[ord(bytes([code]).decode(encoding))] = chr(code)
    return codes


def _is_plausible(text: str, before: str, language: str) -> bool:
    """Return whether the characters beyond ASCII are marks or letters that the language may use.

    before: the text as it was read.
    """
    scripts = scripts_of(alphabet_of(language))
    high = [char for char in text if char > "\x7f"]
    letters = [char for char in high if char.isalpha()]
    if not letters:  # but a word of two letters, such as of Thai, may look like a mark
        is_word = all(script_of(char) in scripts - {"LATIN"} for char in before if char.isalpha())
        return not is_word and all(char in _MARKS for char in high)
    is_phonetic = all("\u0250" <= char <= "\u02ff" for char in letters)
    # Few letters of a script with three bytes for each may be a coincidence.
    is_few = len(letters) < MIN_LONG_LETTERS
    is_chance = is_few and any(char >= ("\u0800" if scripts else "\u0370") for char in letters)
    if is_phonetic or (is_chance and scripts != {"LATIN"}):
        return False
    if scripts:
        if not all(script_of(char) in scripts for char in letters):
            return False
        is_known = any(char.lower() in alphabet_of(language) for char in letters)
        return is_known or _read_again(text, language) is not None  # it was read wrongly twice
    return all(len({*map(script_of, filter(str.isalpha, word))}) < 2 for word in text.split())
