"""What normalization makes of the transcripts of a split: what is dropped, replaced or unusual."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import datasets

from sbkit.data.splits import count_characters, read_texts
from sbkit.text.languages import script_of
from sbkit.text.normalization import APOSTROPHES, is_spoken_symbol, normalize
from sbkit.text.transcripts import TAG_TOKEN, select_tags
from sbkit.text.verbalize import languages_with_numbers

DIGIT_KIND = "digits"
SPELLED_DIGITS = "digits read as words"
SYMBOLS = "dropped symbols"
TAG_KIND = "dropped tags"
REPLACED_KIND = "replaced letters"
OTHER_SCRIPTS = "letters of another script"
DELETED = "deleted characters"
EDGES = "apostrophes left out at the edge of words"
LOOK_ALIKES = "letters that look alike"
NULL_WORDS = "words that often stand for a missing text"
SPEAKERS = "names of speakers"
SUBWORDS = "parts of words by another tool"
FONTS = "text for a font such as Zawgyi, not in the order of Unicode"
WORD_MARKS = "marks between letters that become spaces"
DOTTED = "capitals I that become i, beside \N{LATIN SMALL LETTER DOTLESS I}"
FIXES = {  # of kinds of changes: the key that decides, and what to do
    DIGIT_KIND: (
        "text",
        "Write numbers as they are spoken, or set `text: {numbers: spell}`, which reads "
        f"{', '.join(languages_with_numbers())}.",
    ),
    SYMBOLS: ("language", "Write symbols that are read aloud as words."),
    TAG_KIND: ("keep_tags", "Set `keep_tags: [NAME]` for those that the model shall write."),
    OTHER_SCRIPTS: (
        "language",
        "Write one script: replace letters that only look like others, and write foreign words as "
        "they are spoken.",
    ),
    LOOK_ALIKES: ("language", "Write one of them everywhere if they stand for one letter."),
    EDGES: ("language", "Nothing needs to be done about quotes. Write letters as U+02BC (\u02bc)."),
    DELETED: ("language", "Nothing needs to be done about invisible marks of the layout."),
    SPEAKERS: ("data_folder", "Take them out, because they are trained as spoken words."),
    SUBWORDS: ("data_folder", "Use the transcripts from before that tool."),
    FONTS: ("data_folder", "Convert it to Unicode."),
    WORD_MARKS: ("language", "Nothing needs to be done between words. A letter `:` is U+A789."),
    DOTTED: ("language", "Add the script to the tag, as in kk-Latn, or write I in lower case."),
    NULL_WORDS: ("data_folder", "Leave the field empty if nothing was said, or it is not known."),
}
# Two codes of one letter, which NFC does not unify, and which no language has together: of Arabic,
# Latin, Cyrillic and Armenian letters, of Yoruba's, and of Thai, Lao and Malayalam ones.
_TWO_CODES = (
    "ي|ی ك|ک \u0647|\u06c1 ة|ۃ đ|ð ə|ǝ ş|ș ţ|ț ă|ǎ ğ|ǧ µ|μ ǆ|dž ǉ|lj ǌ|nj \u04cf|\u0456 և|եւ"
    " ẹ|\u0329 ọ|\u0329 ṣ|\u0329 แ|เเ ำ|\u0e4d ແ|ເເ ຳ|ໍາ ຳ|ໍ່າ ຳ|ໍ້າ ໜ|ຫນ ໝ|ຫມ"
    " ൺ|്\u200d ൻ|്\u200d ർ|്\u200d ൽ|്\u200d ൾ|്\u200d"
)
PATTERNS = {  # of kinds that are found in the transcripts as they are written
    NULL_WORDS: re.compile(r"(?i)^\s*(?:nan|null|none|n/?a|#n/a|nil|\\n)\s*$"),
    SPEAKERS: re.compile(r"^\s*(?:(?i:speaker|spk)[ _]?\w{1,3}|[A-Z]\d?):(?!\S)"),
    # Marks of subword-nmt, WordPiece, sentencepiece, BPE, the .ltr files of fairseq, and ESPnet.
    SUBWORDS: re.compile(
        r"(?<=\w)@@(?!\S)|(?<!\S)##(?=\w)|\u2581|(?<!\S)(?:\w ){2,}\|(?!\S)|</w>|<(?i:space)>"
    ),
    LOOK_ALIKES: re.compile(_TWO_CODES.replace(" ", "|")),
    # Unicode's invisible stackers, of Myanmar, Khmer and Tai Tham, join two letters.
    FONTS: re.compile(r"[\u1039\u17d2\u1a60](?![^\W\d_])"),
    WORD_MARKS: re.compile(r"(?<=[^\W\d_])[:·](?=[^\W\d_])"),
}
# Words with an apostrophe at one edge; at both edges it is a quotation mark.
_EDGE_WORD = re.compile(
    "(?<![\\w{0}])(?:[{0}]\\w+|\\w[\\w{0}]*[{0}])(?![\\w{0}])".replace("{0}", APOSTROPHES)
)
SPOKEN_UNIT = re.compile(r"[€$£₽]\s?(?=\d)|(?<=\d)\s?[€$£₽%]")  # is read with its number
MIN_SCRIPT_SHARE = 0.05  # of the letters of a split, for a script of one of its languages
EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")  # are written together
UNKNOWN_LANGUAGE = "und"  # its text table keeps every letter
MAX_LISTED_ITEMS = 50  # of a kind: the most frequent ones


class NormalizedTranscript(NamedTuple):
    """A transcript as written and as trained, its content without tags, and the dropped ones."""

    written: str
    trained: str
    content: str
    dropped_tags: list[str]


def find_changes(split: datasets.Dataset, language: str) -> list[dict[str, Any]]:
    """List each kind of change once, with counts, the most frequent first, and an example.

    Returns plain data: the kind, the total, the counts by character or tag, and a transcript as
    written and as trained.
    """
    if "sentence" not in split.column_names:
        return []
    trained, written = Counter[str](), Counter[str]()
    counts = defaultdict[str, Counter[str]](Counter)
    for rows in _read_transcripts(split):
        trained.update(count_characters([row.trained for row in rows]))
        written.update(count_characters([row.content for row in rows]))
        for row in rows:
            counts[TAG_KIND].update(row.dropped_tags)
            for kind, pattern in PATTERNS.items():
                text = row.trained if kind == LOOK_ALIKES else row.written
                counts[kind].update(map(str.strip, pattern.findall(text)))
            for word in _EDGE_WORD.findall(row.content):
                counts[EDGES][word] += not {"'", "\u02bc"} & {*normalize(word, language)}
    scripts = _main_scripts(trained, language)
    for char, count in written.items():
        if change := _kind_of(char, trained, scripts, language):
            counts[change][char] = count
    counts[DIGIT_KIND] = Counter({c: n for c, n in trained.items() if c.isdecimal()})
    counts[SPELLED_DIGITS] -= counts[DIGIT_KIND]
    if "\N{LATIN SMALL LETTER DOTLESS I}" in trained and normalize("I", language) == "i":
        counts[DOTTED]["I"] = written["I"]
    for joiner in "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}":  # kept in some places only
        counts[DELETED][joiner] = written[joiner] - trained[joiner]
    codes = counts[LOOK_ALIKES]
    pairs = (pair.split("|") for pair in _TWO_CODES.split())
    used_pairs = [pair for pair in pairs if {*pair} <= codes.keys()]
    counts[LOOK_ALIKES] = Counter({code: codes[code] for code in chain(*used_pairs)})
    counts[TAG_KIND] -= counts[SUBWORDS]
    counts[WORD_MARKS] -= trained
    positive_counts = {kind: positive for kind, count in counts.items() if (positive := +count)}
    return [
        {
            "kind": kind,
            "total": count.total(),
            "counts": {visible(key, kind): n for key, n in count.most_common(MAX_LISTED_ITEMS)},
            **_find_example(kind, count, split),
        }
        for kind, count in sorted(positive_counts.items(), key=lambda item: -item[1].total())
    ]


def visible(text: str, kind: str = "") -> str:
    """Return a text; an invisible character as its code, and a look-alike with its codes.

    >>> visible("€"), visible(chr(0x200d)), visible("ș", LOOK_ALIKES)
    ('€', 'U+200D', 'ș (U+0219)')
    """
    codes = " ".join(f"U+{ord(char):04X}" for char in text)
    if len(text) == 1 and unicodedata.category(text)[0] in "MCZ":
        return codes
    return f"{text} ({codes})" if kind in (LOOK_ALIKES, OTHER_SCRIPTS) else text


def _read_transcripts(split: datasets.Dataset) -> Iterator[list[NormalizedTranscript]]:
    for sentences, texts in zip(read_texts(split, "sentence"), read_texts(split), strict=True):
        yield list(map(_compare, sentences, texts))


def _compare(sentence: str, text: str) -> NormalizedTranscript:
    dropped_tags: list[str] = []
    kept_names = TAG_TOKEN.findall(text) if "[" in text else []
    content = unicodedata.normalize("NFC", select_tags(sentence, kept_names, dropped_tags.append))
    if not any(map(str.isdecimal, text)):
        content = SPOKEN_UNIT.sub("", content)
    return NormalizedTranscript(sentence, text, content, dropped_tags)


def _kind_of(char: str, trained: Mapping[str, int], scripts: set[str], language: str) -> str | None:
    """Return the kind of a character's change; None for changes by every text table."""
    is_kept = char in trained
    if char.isdecimal():
        return SPELLED_DIGITS
    if char.isalpha():
        if not is_kept and not trained.keys() >= {*normalize(char, UNKNOWN_LANGUAGE)}:
            return REPLACED_KIND
        is_modifier = unicodedata.category(char) == "Lm"
        return None if is_modifier or _script(char) in scripts else OTHER_SCRIPTS
    if is_kept or char in APOSTROPHES or normalize(char, language):
        return None
    if is_spoken_symbol(char) or unicodedata.category(char) == "Sk":
        return SYMBOLS
    is_invisible = unicodedata.category(char)[0] in "MC" and not char.isspace()
    return DELETED if is_invisible else None


def _script(char: str) -> str:
    """Return the script of a letter; those of East Asia count as one.

    >>> _script("ж"), _script("か")
    ('CYRILLIC', 'CJK')
    """
    name = script_of(char)
    return EAST_ASIAN[0] if name in EAST_ASIAN else name


def _main_scripts(characters: Mapping[str, int], language: str) -> set[str]:
    """Return the most frequent script, or those of a list of languages."""
    counts = Counter[str]()
    for char, count in characters.items():
        if char.isalpha():
            counts[_script(char)] += count
    most_common = counts.most_common(None if "," in language else 1)
    return {script for script, n in most_common if n >= MIN_SCRIPT_SHARE * counts.total()}


def _find_example(kind: str, counts: Counter[str], split: datasets.Dataset) -> dict[str, str]:
    """Return a short transcript with a change, as written and as trained."""
    keys = sorted(key for key, _ in counts.most_common(MAX_LISTED_ITEMS))
    pattern = PATTERNS.get(kind) or re.compile("|".join(map(re.escape, keys)))

    def has_change(row: NormalizedTranscript) -> bool:
        if kind == TAG_KIND:
            return bool(row.dropped_tags)
        return pattern.search(row.written if kind in PATTERNS else row.content) is not None

    batches = ([*filter(has_change, rows)] for rows in _read_transcripts(split))
    matches = next(filter(None, batches), [])
    none = NormalizedTranscript("", "", "", [])
    row = min(matches, key=lambda row: len(row.written), default=none)
    return {"written": row.written, "trained": row.trained}
