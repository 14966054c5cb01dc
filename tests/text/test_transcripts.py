"""Numbers in transcripts become words, the same in training and in scores."""

import json

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.normalization import table_from_stored, table_to_store, text_table
from sbkit.text.transcripts import transcript_normalizer

SPELLED = [
    ("de", "Das kostet 3,50 Euro!", "das kostet drei komma fünf null euro"),
    ("de", "1.234,5 Liter", "eintausendzweihundertvierunddreißig komma fünf liter"),
    (
        "en",
        "In 1999 I paid $5 [noise] for 50%",
        "in nineteen ninety nine i paid five dollars for fifty percent",
    ),
    ("es", "Son 1.000 y 3,5.", "son mil y tres coma cinco"),
]


@pytest.mark.parametrize(("language", "text", "expected"), SPELLED)
def test_numbers_are_spelled_if_the_yaml_says_so(language: str, text: str, expected: str) -> None:
    table = text_table(language, {"numbers": "spell"})
    spell = transcript_normalizer(table)
    assert spell(text) == expected
    assert spell(expected) == expected
    _, stored = table_from_stored(json.loads(json.dumps(table_to_store(table))))
    assert transcript_normalizer(stored)(text) == expected
    assert any(map(str.isdecimal, transcript_normalizer(text_table(language))(text)))


def test_marks_and_capitals_stay_beside_numbers() -> None:
    table = text_table("en", {"case": "keep", "punctuation": [".", ","], "numbers": "spell"})
    assert transcript_normalizer(table)("Well, I saw 12.") == "Well, I saw twelve."


def test_other_languages_and_values_are_refused() -> None:
    with pytest.raises(SbkitError, match=r"`text.numbers: spell` reads .*, but `language` is pl"):
        transcript_normalizer(text_table("pl", {"numbers": "spell"}))
    with pytest.raises(SbkitError, match="`text.numbers` must be keep or spell, but is 'yes'"):
        text_table("en", {"numbers": "yes"})
