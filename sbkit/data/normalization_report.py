"""Report the changes of transcripts by normalization: dropped, replaced and unusual characters."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import datasets

from sbkit.data.damaged_text import find_damage, find_misread_letters, find_misread_word
from sbkit.data.splits import count_characters, read_texts
from sbkit.text.languages import script_of
from sbkit.text.normalization import APOSTROPHES, is_spoken_symbol, normalize
from sbkit.text.transcripts import TAG_TOKEN, select_tags
from sbkit.text.verbalize import languages_with_numbers

DIGIT_KIND = "digits"
SPELLED_DIGITS = "digits read as words"
DROPPED_SYMBOLS = "dropped symbols"
TAG_KIND = "dropped tags"
REPLACED_KIND = "replaced letters"
OTHER_SCRIPTS = "letters of another script"
DELETED_CHARS = "deleted characters"
EDGE_APOSTROPHES = "apostrophes left out at the edge of words"
LOOK_ALIKES = "letters that look alike"
NULL_WORDS = "words that often stand for a missing text"
SPEAKER_NAMES = "names of speakers"
SHARED_STARTS, SHARED_ENDS = "equal beginnings before a mark", "equal ends after a mark"
MISREAD = "text that was decoded in another encoding than its own"
DAMAGED = "text damaged by another tool"
LEGACY_FONTS = "text for a font such as Zawgyi, not in the order of Unicode"
WORD_MARKS = "marks between letters that become spaces"
DOTTED_CAPITALS = "capitals I that become i, beside \N{LATIN SMALL LETTER DOTLESS I}"
FIXES = {  # by kind of change: the YAML key that decides, and advice
    DIGIT_KIND: (
        "text",
        "Write numbers as they are spoken, or set `text: {numbers: spell}`, which reads "
        f"{', '.join(languages_with_numbers())}.",
    ),
    DROPPED_SYMBOLS: ("language", "Write symbols that are read aloud as words."),
    TAG_KIND: ("keep_tags", "Set `keep_tags: [NAME]` for tags that the model should write."),
    OTHER_SCRIPTS: (
        "language",
        "Write one script: replace letters that only look like others, and write foreign words as "
        "they are spoken.",
    ),
    LOOK_ALIKES: ("language", "If they stand for one letter, write the same one everywhere."),
    EDGE_APOSTROPHES: (
        "language",
        "Nothing needs to be done about quotes. Write letters as U+02BC (\u02bc).",
    ),
    DELETED_CHARS: ("language", "Nothing needs to be done about invisible marks of the layout."),
    SPEAKER_NAMES: ("data_folder", "Remove them: they would be trained as spoken words."),
    **dict.fromkeys(
        (SHARED_STARTS, SHARED_ENDS),
        ("data_folder", "Remove what was not spoken, such as a language that a model has written."),
    ),
    MISREAD: (
        "encoding",
        "Name the encoding that the tables were written in by `encoding`, or export them again as "
        "UTF-8.",
    ),
    DAMAGED: (
        "data_folder",
        "Use the transcripts from before that tool, in UTF-8 and without escapes. Letters that are "
        "lost cannot be guessed.",
    ),
    LEGACY_FONTS: ("data_folder", "Convert it to Unicode."),
    WORD_MARKS: ("language", "Nothing needs to be done between words. A letter `:` is U+A789."),
    DOTTED_CAPITALS: (
        "language",
        "Add the script to the tag, as in kk-Latn, or write I in lower case.",
    ),
    NULL_WORDS: ("data_folder", "Leave the field empty if nothing was said, or it is unknown."),
}
# Pairs of codes for one letter that NFC does not unify, and that no language uses together: in
# Arabic, Latin, Cyrillic, Armenian, Yoruba, Thai, Lao and Malayalam; and the apostrophe.
_TWO_CODES = (
    "ي|ی ك|ک \u0647|\u06c1 ة|ۃ đ|ð ə|ǝ ş|ș ţ|ț ă|ǎ ğ|ǧ µ|μ ǆ|dž ǉ|lj ǌ|nj \u04cf|\u0456 և|եւ"
    " ẹ|\u0329 ọ|\u0329 ṣ|\u0329 แ|เเ ำ|\u0e4d ແ|ເເ ຳ|ໍາ ຳ|ໍ່າ ຳ|ໍ້າ ໜ|ຫນ ໝ|ຫມ"
    " '|\u02bc ൺ|്\u200d ൻ|്\u200d ർ|്\u200d ൽ|്\u200d ൾ|്\u200d"
)
PATTERNS = {  # by kind, for kinds that are found in the transcripts as written
    NULL_WORDS: re.compile(r"(?i)^\s*(?:nan|null|none|n/?a|#n/a|nil|\\n)\s*$"),
    SPEAKER_NAMES: re.compile(r"^\s*(?:(?i:speaker|spk)[ _]?\w{1,3}|[A-Z]\d?):(?!\S)"),
    # "language English<asr_text>hello" of Qwen3-ASR, "Here is the transcript: hello"
    SHARED_STARTS: re.compile(
        r"^(?=\W*[^\W\d_])[^<>=|{}:\n]{1,80}+(?:<[^<>\n]{1,40}>|[=|}\n]|:(?!\s?\d))"
    ),
    SHARED_ENDS: re.compile(r"(?:<[^<>\n]{1,40}>|[=|{\n])(?=\W*[^\W\d_])[^<>=|{}:\n]{1,80}+$"),
    LOOK_ALIKES: re.compile(_TWO_CODES.replace(" ", "|")),
    # Unicode's invisible stackers, of Myanmar, Khmer and Tai Tham, join two letters.
    LEGACY_FONTS: re.compile(r"[\u1039\u17d2\u1a60](?![^\W\d_])"),
    WORD_MARKS: re.compile(r"(?<=[^\W\d_])[:·](?=[^\W\d_])"),
}
# Words with an apostrophe at one edge; at both edges it is a quotation mark.
_EDGE_WORD = re.compile(
    "(?<![\\w{0}])(?:[{0}]\\w+|\\w[\\w{0}]*[{0}])(?![\\w{0}])".replace("{0}", APOSTROPHES)
)
SPOKEN_UNIT = re.compile(r"[€$£₽]\s?(?=\d)|(?<=\d)\s?[€$£₽%]")  # read aloud with its number
MIN_SCRIPT_SHARE = 0.05  # of a split's letters, to count as the script of one of its languages
MIN_SHARING_ROWS = 3  # with one beginning or end
EAST_ASIAN_SCRIPTS = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")  # written together
UNKNOWN_LANGUAGE = "und"  # its text table keeps every letter
MAX_LISTED_ITEMS = 50  # the most frequent characters or tags of a kind


class NormalizedTranscript(NamedTuple):
    """A transcript as written and as trained, its content without tags, and the dropped tags."""

    written: str
    trained: str
    content: str
    dropped_tags: list[str]


def find_changes(split: datasets.Dataset, language: str) -> list[dict[str, Any]]:
    """List the kinds of changes with counts and an example, the most frequent kind first.

    A transcript of another encoding counts as nothing else, nor do damaged parts. Returns plain
    data: the kind, the total, the counts by character, tag or word, and a transcript as written and
    as trained.
    """
    if "sentence" not in split.column_names:
        return []
    trained, written = Counter[str](), Counter[str]()
    counts = defaultdict[str, Counter[str]](Counter)
    for transcripts in _read_transcripts(split):
        rows: list[NormalizedTranscript] = []
        for row in transcripts:
            damaged_parts = _find_damage(row, language)
            for kind, parts in damaged_parts.items():
                counts[kind].update(parts)
            if MISREAD not in damaged_parts:
                rows.append(_without(row, damaged_parts.get(DAMAGED, [])))
        trained.update(count_characters([row.trained for row in rows]))
        written.update(count_characters([row.content for row in rows]))
        for row in rows:
            counts[TAG_KIND].update(row.dropped_tags)
            for kind, pattern in PATTERNS.items():
                text = row.trained if kind == LOOK_ALIKES else row.written
                counts[kind].update(map(str.strip, pattern.findall(text)))
            for word in _EDGE_WORD.findall(row.content):
                counts[EDGE_APOSTROPHES][word] += not {"'", "\u02bc"} & {*normalize(word, language)}
    if misread := find_misread_letters(written, len(split), language):
        damage = {MISREAD: counts[MISREAD] + Counter(misread), DAMAGED: counts[DAMAGED]}
        return _describe(damage, split, language)
    scripts = _main_scripts(trained, language)
    for char, count in written.items():
        if kind_of_change := _kind_of(char, trained, scripts, language):
            counts[kind_of_change][char] = count
    for kind in (SHARED_STARTS, SHARED_ENDS):  # most of the transcripts have one of a few
        edges = {edge: n for edge, n in counts[kind].items() if n >= MIN_SHARING_ROWS}
        counts[kind] = Counter(edges if 2 * sum(edges.values()) > len(split) else {})
    if counts[SHARED_STARTS]:  # the rest of a transcript may be equal, such as yes and no
        del counts[SHARED_ENDS]
    counts[DIGIT_KIND] = Counter({c: n for c, n in trained.items() if c.isdecimal()})
    counts[SPELLED_DIGITS] -= counts[DIGIT_KIND]
    if "\N{LATIN SMALL LETTER DOTLESS I}" in trained and normalize("I", language) == "i":
        counts[DOTTED_CAPITALS]["I"] = written["I"]
    for joiner in "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}":  # kept in some positions only
        counts[DELETED_CHARS][joiner] = written[joiner] - trained[joiner]
    codes = counts[LOOK_ALIKES]
    pairs = (pair.split("|") for pair in _TWO_CODES.split())
    used_pairs = [pair for pair in pairs if {*pair} <= codes.keys()]
    counts[LOOK_ALIKES] = Counter({code: codes[code] for code in chain(*used_pairs)})
    counts[WORD_MARKS] -= trained
    return _describe(counts, split, language)


def _describe(
    counts: Mapping[str, Counter[str]], split: datasets.Dataset, language: str
) -> list[dict[str, Any]]:
    positive_counts = {kind: positive for kind, count in counts.items() if (positive := +count)}
    return [
        {
            "kind": kind,
            "total": count.total(),
            "counts": {visible(key, kind): n for key, n in count.most_common(MAX_LISTED_ITEMS)},
            **_find_example(kind, count, split, language),
        }
        for kind, count in sorted(positive_counts.items(), key=lambda item: -item[1].total())
    ]


def visible(text: str, kind: str = "") -> str:
    """Write an invisible character as its code, a look-alike with its codes, other text as it is.

    >>> visible("€"), visible(chr(0x200d)), visible("ș", LOOK_ALIKES)
    ('€', 'U+200D', 'ș (U+0219)')
    """
    codes = " ".join(f"U+{ord(char):04X}" for char in text)
    if len(text) == 1 and unicodedata.category(text)[0] in "MCZ":
        return codes
    return f"{text} ({codes})" if kind in (LOOK_ALIKES, OTHER_SCRIPTS) else text


def _read_transcripts(split: datasets.Dataset) -> Iterator[list[NormalizedTranscript]]:
    for sentences, texts in zip(read_texts(split, "sentence"), read_texts(split), strict=True):
        yield list(map(_to_transcript, sentences, texts))


def _to_transcript(sentence: str, text: str) -> NormalizedTranscript:
    dropped_tags: list[str] = []
    kept_names = TAG_TOKEN.findall(text) if "[" in text else []
    content = unicodedata.normalize("NFC", select_tags(sentence, kept_names, dropped_tags.append))
    if not any(map(str.isdecimal, text)):
        content = SPOKEN_UNIT.sub("", content)
    return NormalizedTranscript(sentence, text, content, dropped_tags)


def _without(row: NormalizedTranscript, parts: Sequence[str]) -> NormalizedTranscript:
    """Leave out damaged parts."""
    written, content = row.written, row.content
    for part in parts:
        written, content = written.replace(part, " "), content.replace(part, " ")
    tags = [tag for tag in row.dropped_tags if tag not in parts]
    return row._replace(written=written, content=content, dropped_tags=tags)


def _kind_of(char: str, trained: Mapping[str, int], scripts: set[str], language: str) -> str | None:
    """Return the kind of a character's change; None if every text table makes that change."""
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
        return DROPPED_SYMBOLS
    is_invisible = unicodedata.category(char)[0] in "MC" and not char.isspace()
    return DELETED_CHARS if is_invisible else None


def _script(char: str) -> str:
    """Return the script of a letter; the scripts of East Asia count as one.

    >>> _script("ж"), _script("か")
    ('CYRILLIC', 'CJK')
    """
    name = script_of(char)
    return EAST_ASIAN_SCRIPTS[0] if name in EAST_ASIAN_SCRIPTS else name


def _main_scripts(characters: Mapping[str, int], language: str) -> set[str]:
    """Return the most frequent script; for a list of languages, all frequent scripts."""
    counts = Counter[str]()
    for char, count in characters.items():
        if char.isalpha():
            counts[_script(char)] += count
    most_common = counts.most_common(None if "," in language else 1)
    return {script for script, n in most_common if n >= MIN_SCRIPT_SHARE * counts.total()}


def _find_damage(row: NormalizedTranscript, language: str) -> dict[str, list[str]]:
    """Return the damaged parts of a transcript by kind; {} for most transcripts."""
    if PATTERNS[NULL_WORDS].search(row.written):
        return {}
    if misread := find_misread_word(row.written, language):
        return {MISREAD: [misread]}
    parts = [*find_damage(row.written, row.trained, language)]
    return {DAMAGED: parts} if parts else {}


def _find_example(
    kind: str, counts: Counter[str], split: datasets.Dataset, language: str
) -> dict[str, str]:
    """Return a short transcript with a change, as written and as trained."""
    keys = sorted(key for key, _ in counts.most_common(MAX_LISTED_ITEMS))
    pattern = re.compile("|".join(map(re.escape, keys)))
    if kind not in (SHARED_STARTS, SHARED_ENDS):  # whose pattern also finds rare ones
        pattern = PATTERNS.get(kind, pattern)

    if kind == MISREAD:
        pattern = re.compile("|".join(re.escape(key.partition(" for ")[0]) for key in keys))

    def has_change(row: NormalizedTranscript) -> bool:
        if kind == DAMAGED:
            return kind in _find_damage(row, language)
        if kind == TAG_KIND:
            return bool(row.dropped_tags)
        as_written = kind == MISREAD or kind in PATTERNS
        return pattern.search(row.written if as_written else row.content) is not None

    batches = ([*filter(has_change, rows)] for rows in _read_transcripts(split))
    matches = next(filter(None, batches), [])
    empty = NormalizedTranscript("", "", "", [])
    row = min(matches, key=lambda row: len(row.written), default=empty)
    return {"written": row.written, "trained": row.trained}
