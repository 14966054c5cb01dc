"""What normalization makes of the transcripts of a split: what is dropped, replaced or unusual."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import datasets

from sbkit.data.splits import count_characters, read_texts
from sbkit.text.normalization import is_spoken_symbol, normalize
from sbkit.text.tags import count_dropped_tags, kept_tags, select_tags, unify_tags

DIGITS = "digits"
SPELLED_DIGITS = "digits read as words"
SYMBOLS = "dropped symbols"
TAGS = "dropped tags"
REPLACED = "replaced letters"
OTHER_SCRIPTS = "letters of another script"
DELETED = "deleted characters"
NULL_WORDS = "words that often stand for a missing text"
NULL_WORD = re.compile(r"(?i)(nan|null|none|n/?a|#n/a|nil)")  # a transcript without other words
UNIT = re.compile(r"[€$£¥₹]\s?(?=\d)|(?<=\d)\s?[€$£¥₹%‰°]")
NOTHING = re.compile("(?!)")
MIN_SCRIPT_SHARE = 0.05  # of the letters of a split, for one of its own scripts
EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")  # are written together
UNKNOWN_LANGUAGE = "und"  # its text table keeps every letter
MAX_CHARACTERS = 50  # of a kind: the most frequent ones


def find_changes(split: datasets.Dataset, language: str) -> list[dict[str, Any]]:
    """List each kind of change once, with counts, the most frequent first, and an example.

    Returns plain data: the kind, the total, the counts by character or tag, and a transcript as
    written and as trained.
    """
    if "sentence" not in split.column_names:
        return []
    trained = count_characters(read_texts(split))
    kept = kept_tags(text for texts in read_texts(split) for text in texts)
    # Where digits are read as words, so are the units beside them.
    read = UNIT if not any(map(str.isdecimal, trained)) else NOTHING
    written = count_characters(
        [_compose(read.sub("", select_tags(unify_tags(text), kept))) for text in texts]
        for texts in read_texts(split, "sentence")
    )
    scripts = _main_scripts(trained)
    counts = defaultdict[str, Counter[str]](Counter)
    for char, count in written.items():
        if kind := _kind_of(char, trained, scripts, language):
            counts[kind][char] = count
    for joiner in "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}":  # kept in some places only
        counts[DELETED][joiner] = written[joiner] - trained[joiner]
    for texts in read_texts(split, "sentence"):
        counts[TAGS] += count_dropped_tags(texts, kept)
        stripped = (text.strip() for text in texts)
        counts[NULL_WORDS].update(text for text in stripped if NULL_WORD.fullmatch(text))
    counts = defaultdict(Counter, {kind: +count for kind, count in counts.items() if +count})
    examples = _find_examples(split, counts)
    return [
        {
            "kind": kind,
            "total": count.total(),
            "counts": {visible(key): n for key, n in count.most_common(MAX_CHARACTERS)},
            "written": examples[kind][0],
            "trained": examples[kind][1],
        }
        for kind, count in sorted(counts.items(), key=lambda item: -item[1].total())
    ]


def visible(text: str) -> str:
    """Return a text, or the code of a character that cannot be seen alone.

    >>> visible("€"), visible(chr(0x200d))
    ('€', 'U+200D')
    """
    is_alone = len(text) == 1 and unicodedata.category(text)[0] in "MCZ"
    return f"U+{ord(text):04X}" if is_alone else text


def _compose(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _kind_of(char: str, trained: Mapping[str, int], scripts: set[str], language: str) -> str | None:
    """Return what happens to a character; None for what every text table does."""
    is_kept = char in trained
    if char.isdecimal():
        return DIGITS if is_kept else SPELLED_DIGITS
    if char.isalpha():
        if not is_kept and not trained.keys() >= {*normalize(char, UNKNOWN_LANGUAGE)}:
            return REPLACED
        return None if _script(char) in scripts else OTHER_SCRIPTS
    if is_kept or normalize(char, language):
        return None
    if is_spoken_symbol(char):
        return SYMBOLS
    is_invisible = unicodedata.category(char)[0] in "MC" and not char.isspace()
    return DELETED if is_invisible else None


def _script(char: str) -> str:
    """Return the first word of a letter's name, which is its script.

    >>> _script("ж"), _script("か")
    ('CYRILLIC', 'CJK')
    """
    name = unicodedata.name(char, "").partition(" ")[0]
    return EAST_ASIAN[0] if name in EAST_ASIAN else name


def _main_scripts(characters: Mapping[str, int]) -> set[str]:
    counts = Counter[str]()
    for char, count in characters.items():
        if char.isalpha():
            counts[_script(char)] += count
    return {script for script, n in counts.items() if n >= MIN_SCRIPT_SHARE * counts.total()}


def _find_examples(
    split: datasets.Dataset, counts: Mapping[str, Counter[str]]
) -> dict[str, tuple[str, str]]:
    """Return a short transcript with each kind of change, as written and as trained."""
    patterns = {
        kind: re.compile("|".join(map(re.escape, sorted(count)))) for kind, count in counts.items()
    }
    examples: dict[str, tuple[str, str]] = {}
    for sentences, texts in zip(read_texts(split, "sentence"), read_texts(split), strict=True):
        for kind, pattern in patterns.items():
            find = pattern.fullmatch if kind == NULL_WORDS else pattern.search
            if kind not in examples:
                pairs = zip(sentences, texts, strict=True)
                matching = [pair for pair in pairs if find(_compose(pair[0]).strip())]
                if matching:
                    examples[kind] = min(matching, key=lambda pair: len(pair[0]))
    return examples
