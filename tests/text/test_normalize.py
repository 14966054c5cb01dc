"""Each row tells what a transcript of one language is to look like."""

import unicodedata
from pathlib import Path
from random import Random

import pytest

from sbkit.text.normalize import ORTHOGRAPHIES, normalize, orthography

MARKS = "aIİßΣeё\u0301\u0308\u0307'\u2019·-. \u00ad\u200dAl"

TABLE = Path(__file__).with_name("transcripts.tsv").read_text(encoding="utf-8")
CASES = [tuple(line.split("\t")) for line in TABLE.splitlines()[1:]]
CASES += [  # what a table cannot show
    ("en", "cafe\u0301 m\u0304", "cafe m"),
    ("en", "a\u00adb c\u200bd e\ufefff", "ab cd ef"),
    ("en", "no\u00a0break\tand\u2003wide\r\n", "no break and wide"),
    ("en", "🤷🏽\u200d♀️ Fine 1️⃣ 👍", "fine 1"),
    ("en", '... "!?" —', ""),
    ("en", "", ""),
    ("fr", "«\u00a0À bientôt\u00a0!\u00a0» dit-elle", "à bientôt dit elle"),
    ("it", "Qual E\u0300 il PERCHE\u0301", "qual è il perché"),
    ("ja", "「こんにちは」、ラーメン か\u3099", "こんにちは ラーメン が"),
    ("ar", "مرحـــبا\u200f", "مرحبا"),
    ("", "Any Tag", "any tag"),
]


@pytest.mark.parametrize(("language", "text", "expected"), CASES)
def test_normalize(language: str, text: str, expected: str) -> None:
    normal = normalize(text, language)
    assert normal == unicodedata.normalize("NFC", expected)
    assert normalize(normal, language) == normal


@pytest.mark.parametrize("language", [*ORTHOGRAPHIES, "xx"])
def test_normalizing_twice_changes_nothing(language: str) -> None:
    """Characters of the scripts up to the kana, alone and in random company."""
    chars = [c for c in map(chr, range(0x3100)) if unicodedata.category(c) != "Cn"]
    random = Random(language)
    texts = chars + ["".join(random.choices(chars, k=12)) for _ in range(500)]
    texts += ["".join(random.choices(MARKS, k=9)) for _ in range(500)]
    for text in texts:
        normal = normalize(text, language)
        assert normalize(normal, language) == normal, ascii(text)


@pytest.mark.parametrize(
    "language", [name for name, table in ORTHOGRAPHIES.items() if table.letters]
)
def test_a_language_keeps_its_own_letters(language: str) -> None:
    letters = orthography(language).letters
    assert normalize(letters.upper().replace("SS", "ß"), language) == letters
