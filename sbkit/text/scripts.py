"""The scripts that texts are written in, to find transcripts of another one; rare characters."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

# Scripts that one language writes together: Japanese with Chinese characters, Korean too.
_TOGETHER = {"CJK": "EAST ASIAN", "HIRAGANA": "EAST ASIAN", "KATAKANA": "EAST ASIAN"}
_TOGETHER |= {"HANGUL": "EAST ASIAN", "BOPOMOFO": "EAST ASIAN"}


@cache
def script_of(char: str) -> str:
    """Return the script of a letter by the first word of its Unicode name; "" if it is none."""
    if not unicodedata.category(char).startswith("L") or unicodedata.category(char) == "Lm":
        return ""
    word = unicodedata.name(char, "").split(" ")[0]
    return _TOGETHER.get(word, word)


def texts_by_script(texts: Iterable[str]) -> Counter[str]:
    """Count the texts that hold letters of each script."""
    return Counter(script for text in texts for script in set(map(script_of, text)) - {""})


def in_another_script(texts: Iterable[str]) -> list[int]:
    """Return the numbers of the texts with letters of a script that is not the most frequent."""
    texts = list(texts)
    counts = texts_by_script(texts)
    usual = {script for script, _ in counts.most_common(1)} | {""}
    return [row for row, text in enumerate(texts) if not set(map(script_of, text)) <= usual]


def rare_characters(texts: Iterable[str], at_most: int = 2) -> dict[str, int]:
    """Return the characters that come at most so often in all texts, with their counts."""
    counts = Counter(char for text in texts for char in text)
    return {char: count for char, count in sorted(counts.items()) if count <= at_most}
