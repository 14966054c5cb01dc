"""Normalization: each row has a transcript and its normalized text."""

import hashlib
import json
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.normalization import (
    TEXT_TABLES,
    count_gaps,
    describe_normalizer,
    has_spaces,
    join_segments,
    language_table,
    languages_with,
    normalize,
    table_from_stored,
    table_to_store,
    text_table,
)
from sbkit.text.normalizers import named_normalizer, table_normalizer
from tests.stores import read_split

MARKS = "aIİßΣeё\u0301\u0308\u0307'\u2019\u02bc\u02bb·-. \u00ad\u200dAl"

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
    ("ja", "「こんにちは」、ラーメン か\u3099", "こんにちはラーメンが"),
    ("ja", "か \u3099", "が"),
    ("ar", "مرحـــبا\u200f", "مرحبا"),
    ("", "Any Tag", "any tag"),
    ("fa", "می\u200cخواهم. \u200cکتاب\u200c", "می\u200cخواهم کتاب"),
    ("ckb", "ده\u200cچم", "ده\u200cچم"),
    ("si", "ශ්\u200dරී ලංකා\u200d", "ශ්\u200dරී ලංකා"),
    ("ml", "അവന്\u200d, ക്\u200cഷ", "അവന്\u200d ക്\u200cഷ"),
    ("mr", "दर्\u200dया", "दर्\u200dया"),
    ("bn", "র\u200d্যাব \u200dব", "র\u200d্যাব ব"),
    ("en", "co\u200dop a\u200cb", "coop ab"),
    ("ar", "\ufee3\ufeae\ufea3\ufe92\ufe8e", "مرحبا"),
]


@pytest.mark.parametrize(("language", "text", "expected"), CASES)
def test_normalize(language: str, text: str, expected: str) -> None:
    normal = normalize(text, language)
    assert normal == unicodedata.normalize("NFC", expected)
    assert normalize(normal, language) == normal


# One language for each table.
LANGUAGES = [*{repr(table): language for language, table in TEXT_TABLES.items()}.values(), "ja"]


@pytest.mark.parametrize("language", [*LANGUAGES, "xx"])
def test_normalize_is_idempotent(language: str) -> None:
    """Try the characters up to the kana, each by itself and in random texts."""
    chars = [c for c in map(chr, range(0x3100)) if unicodedata.category(c) != "Cn"]
    random = Random(language)
    texts = chars + ["".join(random.choices(chars, k=12)) for _ in range(500)]
    texts += ["".join(random.choices(MARKS, k=9)) for _ in range(500)]
    for text in texts:
        normal = normalize(text, language)
        assert normalize(normal, language) == normal, ascii(text)


@pytest.mark.parametrize("language", [tag for tag, table in TEXT_TABLES.items() if table.letters])
def test_language_keeps_its_own_letters(language: str) -> None:
    letters = language_table(language).letters
    assert normalize(letters.upper().replace("SS", "ß"), language) == letters


def test_texts_of_default_corpus_are_those_of_version_1(asterisk_english: Path) -> None:
    clips = read_split({"data_folder": asterisk_english}, "validated")
    texts = "\n".join(normalize(clip.sentence, "en") for clip in clips)
    assert hashlib.sha256(texts.encode()).hexdigest().startswith("ff219231bba757c8")


def test_invalid_stored_table_is_refused() -> None:
    changes: list[dict[str, Any]] = [
        {"version": "2"},
        {"letters": 0},
        {"rewrite": {"a": 1}},
        {"rewrite": {"ab": "c"}},
        {"rewrite": {"a": "bb", "b": "cc"}},
        {"rewrite": 1},
        {"spaces": "no"},
        {"x": ""},
    ]
    for change in changes:
        with pytest.raises((ValueError, TypeError)):
            table_from_stored({**table_to_store(text_table("en")), **change})


def test_join_segments_with_and_without_spaces() -> None:
    for segments, joined in (
        (["it is", "", "late"], "it is late"),
        (["我爱", "北京", "ok", "iphone", "手机"], "我爱北京ok iphone手机"),
        (["こんにちは", "ラーメン"], "こんにちはラーメン"),
        (["안녕", "하세요"], "안녕 하세요"),
        (["", ""], ""),
        (["你好。", "再见", "OK.", "Yes"], "你好。再见OK. Yes"),
    ):
        assert join_segments(segments, spaces=False) == joined
        assert join_segments(segments, spaces=True) == " ".join(filter(None, segments))


@pytest.mark.parametrize(
    ("texts", "spaces"),
    [
        (["請輸入您的密碼 然後", "我 用 iPhone"], False),  # also if a tool has cut words
        (["ใช้ iPhone ได้", "สวัสดีครับผม ขอบคุณที่โทรมา"], False),
        (["སྐད་ ཡིག་ ཁྱེད་"], False),
        (["ကညီ ကျိာ် ဖိ ထံ"], True),  # Karen
        (["wo yong iPhone", "我"], True),
        (["안녕 하세요"], True),
        (["I met 李明 at the station"], True),
    ],
)
def test_transcripts_tell_whether_words_are_separated(texts: list[str], spaces: bool) -> None:
    assert has_spaces(Counter("".join(texts)), sum(map(count_gaps, texts))) == spaces


def test_languages_with_letters() -> None:
    assert languages_with(Counter("ąęł")) == ["pl"]
    assert languages_with({}) == []
    assert languages_with({"a": 95, "ä": 5})[:2] == ["de", "en"]  # most letters kept first
    assert languages_with({"é": 1})[:3] == ["es", "it", "ca"]  # the shortest tables first


# ---- tables that keep case and punctuation, and the normalizers that scores use

KEPT_MARKS = [".", ",", "?", "!", "-", "«", "»", "¿", "¡", "(", ")"]
LETTERS = "aIiİeЁёÉ \u00ad-,?!.…«»¿()5&\u3002\uff0c你"


@pytest.mark.parametrize(
    ("language", "marks", "text", "expected"),
    [
        ("en", ".,?!", "Hello , “Mr. Wu” — how's CAFÉ?", "Hello, Mr. Wu how's CAFE?"),
        ("en", ".,", "'Exactly...' , 3.5 e.g. U.S.A. & all!", "Exactly., 3.5 e.g. U.S.A. and all"),
        ("en", "", "The U.S.A., Œuvre", "The USA Oeuvre"),
        ("en", "%-", "T-shirt -50%", "T-shirt -50%"),
        ("en", ".", "... ?", ""),
        ("fr", "?!«»", "«\u00a0Ça va\u00a0?\u00a0» L\u2019Œuvre\u202f!", "«Ça va?» L'Œuvre!"),
        ("es", "¿?", "¿ Qué tal ?", "¿Qué tal?"),
        ("de", ".", "GROẞE Straße.", "GROẞE Straße."),
        ("tr", ".", "Iğdır İzmir.", "Iğdır İzmir."),
        ("ca", "", "PARAĿLEL", "PARAL·LEL"),
        ("zh", "，。", "你好， 世界 。 OK,", "你好，世界。OK"),
        ("ja", "。、", "こんにちは 、世界", "こんにちは、世界"),
        ("mt", ",", "Ta', 'Kelb', Qata'", "Ta', Kelb, Qata'"),
        ("ha", "", "'Yar ʼYa", "'Yar 'Ya"),
    ],
)
def test_table_keeps_case_and_marks(language: str, marks: str, text: str, expected: str) -> None:
    table = text_table(language, {"case": "keep", "punctuation": [*marks]})
    assert normalize(text, language, table) == expected


@pytest.mark.parametrize("case", ["lower", "keep"])
@pytest.mark.parametrize("language", [*LANGUAGES, "xx", "el"])
def test_plain_form_of_a_kept_text_is_that_of_the_transcript(language: str, case: str) -> None:
    """Try single characters and random texts; nothing changes twice."""
    random = Random(language)
    texts = [c for c in map(chr, range(0x600)) if unicodedata.category(c) != "Cn"]
    texts += ["".join(random.choices(LETTERS, k=9)) for _ in range(300)]
    for marks in ([], KEPT_MARKS):
        table = text_table(language, {"case": case, "punctuation": marks})
        for text in texts:
            kept = normalize(text, language, table)
            assert normalize(kept, language, table) == kept, ascii(text)
            assert normalize(kept, language) == normalize(text, language), ascii(text)


def test_default_is_the_table_of_the_language_and_a_kept_one_is_stored() -> None:
    assert text_table("en") == text_table("en", {"case": "lower"}) == language_table("en")
    table = text_table("en", {"case": "keep", "punctuation": [".", "%"]})
    for kept in (table, text_table("en", {"numbers": "spell"})):
        assert table_from_stored(json.loads(json.dumps(table_to_store(kept)))) == kept
    assert table.plain == language_table("en")
    described = describe_normalizer("en", table)
    assert described.startswith("text table of en: upper and lower case, the letters abc")
    assert described.endswith("z, the marks . %")
    names = [describe_normalizer(tag, language_table(tag)) for tag in ("tt-Latn", "tt", "ja")]
    assert [name.split(":")[0] for name in names] == [
        "text table of tt",
        "text table of all other languages",
        "text table of all other languages",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("keep", "`text` must be a mapping .* but is 'keep'"),
        ({"caps": "keep"}, "`text` must be a mapping"),
        ({"case": "upper"}, "`text.case` must be lower or keep, but is 'upper'"),
        ({"numbers": "yes"}, "`text.numbers` must be keep or spell, but is 'yes'"),
        *(
            ({"punctuation": marks}, "`text.punctuation` must list marks")
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
    rewrite = dict(reversed([*language_table("de").rewrite.items()]))  # keys in another order
    reordered = table_normalizer("de", replace(language_table("de"), rewrite=rewrite))
    assert reordered.sha256 == german.sha256


def test_whispers_normalizers_are_those_of_transformers() -> None:
    pytest.importorskip("transformers")
    basic = named_normalizer("whisper-basic")
    assert basic.normalize("Ça va, M. Œuvre ?").split() == ["ça", "va", "m", "œuvre"]
    pytest.importorskip("whisper_normalizer")
    english = named_normalizer("whisper-english")
    normal = english.normalize("Mr. Wu's colour, fifty-five percent: won't he?")
    assert " ".join(normal.split()) == "mister wu is color 55% will not he"
    assert english.sha256 != basic.sha256
