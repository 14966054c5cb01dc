"""Text tables that keep case and punctuation, and the normalizers that scores use."""

import json
import unicodedata
from dataclasses import replace
from random import Random

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.normalization import (
    ORTHOGRAPHIES,
    describe_normalizer,
    normalize,
    orthography,
    table_from_stored,
    table_to_store,
    text_table,
)
from sbkit.text.normalizers import named_normalizer, table_normalizer

MARKS = [".", ",", "?", "!", "-", "«", "»", "¿", "¡", "(", ")"]
LETTERS = "aIiİeЁёÉ \u00ad-,?!.…«»¿()5&\u3002\uff0c你"


@pytest.mark.parametrize(
    ("language", "marks", "text", "expected"),
    [
        ("en", ".,?!", "Hello , “Mr. Wu” — how's CAFÉ?", "Hello, Mr. Wu how's CAFE?"),
        (
            "en",
            ".,",
            "'Exactly...' , 3.5 e.g. U.S.A. & more!",
            "Exactly., 3.5 e.g. U.S.A. and more",
        ),
        ("en", "", "The U.S.A., Œuvre", "The USA Oeuvre"),
        ("en", "%-", "T-shirt -50%", "T-shirt -50%"),
        ("en", ".", "... ?", ""),
        ("fr", "?!«»", "«\u00a0Ça va\u00a0?\u00a0» L\u2019Œuvre\u202f!", "«Ça va?» L'Œuvre!"),
        ("es", "¿?", "¿ Qué tal ?", "¿Qué tal?"),
        ("de", ".", "GROẞE Straße.", "GROẞE Straße."),
        ("tr", ".", "Iğdır İzmir.", "Iğdır İzmir."),
        ("ca", "", "PARAĿLEL", "PARAL·LEL"),
        ("zh", "，。", "你好， 世界 。 OK,", "你好，世界。 OK"),
        ("ja", "。、", "こんにちは 、世界", "こんにちは、世界"),
    ],
)
def test_table_keeps_case_and_marks(language: str, marks: str, text: str, expected: str) -> None:
    table = text_table(language, {"case": "keep", "punctuation": [*marks]})
    assert normalize(text, language, table) == expected


@pytest.mark.parametrize("case", ["lower", "keep"])
@pytest.mark.parametrize("language", [*ORTHOGRAPHIES, "xx", "el", "ja"])
def test_plain_form_of_a_kept_text_is_that_of_the_transcript(language: str, case: str) -> None:
    """Try single characters and random texts; nothing changes twice."""
    random = Random(language)
    texts = [c for c in map(chr, range(0x600)) if unicodedata.category(c) != "Cn"]
    texts += ["".join(random.choices(LETTERS, k=9)) for _ in range(300)]
    for marks in ([], MARKS):
        table = text_table(language, {"case": case, "punctuation": marks})
        for text in texts:
            kept = normalize(text, language, table)
            assert normalize(kept, language, table) == kept, ascii(text)
            assert normalize(kept, language) == normalize(text, language), ascii(text)


def test_default_is_the_table_of_the_language_and_a_kept_one_is_stored() -> None:
    assert text_table("en") == text_table("en", {"case": "lower"}) == orthography("en")
    table = text_table("en", {"case": "keep", "punctuation": [".", "%"]})
    stored = json.loads(json.dumps(table_to_store(table)))
    assert table_from_stored(stored) == table
    assert table.plain == orthography("en")
    described = describe_normalizer("en", table)
    assert described.startswith("text table of en: upper and lower case, the letters abc")
    assert described.endswith("z, the marks . %")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "keep",
            "`text` must be a mapping of case, punctuation and numbers, such as .*, but is 'keep'",
        ),
        ({"caps": "keep"}, "`text` must be a mapping of case, punctuation and numbers"),
        ({"case": "upper"}, "`text.case` must be lower or keep, but is 'upper'"),
        *(
            (
                {"punctuation": marks},
                "`text.punctuation` must be a list of single marks that do not",
            )
            for marks in (".,", [1], ["ab"], ["a"], ["▁"], ["€"], ["’"])
        ),
    ],
)
def test_settings_of_another_form_are_refused(settings: object, message: str) -> None:
    with pytest.raises(SbkitError, match=message):
        text_table("en", settings)


def test_normalizers_have_hashes_of_their_rules() -> None:
    english, german = named_normalizer("en"), named_normalizer("de")
    assert str(english) == f"text table of en {english.sha256[:12]}"
    assert english.normalize("Hello, CAFÉ!") == "hello cafe"
    kept = table_normalizer("en", text_table("en", {"case": "keep"}))
    assert kept.name == "text table of en, as written"
    assert len({english.sha256, german.sha256, kept.sha256}) == 3
    rewrite = dict(reversed([*orthography("de").rewrite.items()]))  # keys in another order
    reordered = table_normalizer("de", replace(orthography("de"), rewrite=rewrite))
    assert reordered.sha256 == german.sha256
    with pytest.raises(SbkitError, match="must be whisper-english, whisper-basic or the tag of a"):
        named_normalizer("whisper")


def test_whispers_normalizers_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    basic = named_normalizer("whisper-basic")
    assert basic.normalize("Ça va, M. Œuvre ?").split() == ["ça", "va", "m", "œuvre"]
    pytest.importorskip("whisper_normalizer")
    english = named_normalizer("whisper-english")
    normal = english.normalize("Mr. Wu's colour, fifty-five percent: won't he?")
    assert " ".join(normal.split()) == "mister wu is color 55% will not he"
    assert english.sha256 != basic.sha256
