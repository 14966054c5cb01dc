"""Known language tags are accepted; errors say how to write others."""

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.languages import (
    language_code,
    language_tags,
    parse_language,
    single_language_tag,
    whisper_language,
)
from sbkit.text.normalization import normalize, text_table


@pytest.mark.parametrize(
    "tag", ["de", "sv-SE", "zh-CN", "zh_Hant_TW", "rm-sursilv", "nan-tw", "hsb", "no", "DE", "ceb"]
)
def test_known_tag_is_returned_unchanged(tag: str) -> None:
    assert parse_language(tag) == tag


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("deu", r"Write de\."),
        ("deu-DE", r"Write de-DE\."),
        ("German", r"Write its ISO 639 code"),
        ("qq", r"Write its ISO 639 code"),
        ("cmn_hans_cn", r"Write zh_hans_cn\."),
    ],
)
def test_unknown_tag_is_refused_with_advice(value: object, advice: str) -> None:
    with pytest.raises(SbkitError, match=f"`language` must be .*{advice}"):
        parse_language(value)


@pytest.mark.parametrize(
    ("code", "language"),
    [
        *(("uzn", "uz"), ("azj", "az"), ("ydd", "yi"), ("fuc", "ff"), ("swh", "sw"), ("ekk", "et")),
        *(("khk", "mn"), ("lvs", "lv"), ("npi", "ne"), ("pes", "fa"), ("als", "sq"), ("zsm", "ms")),
    ],
)
def test_code_of_the_usual_form_of_a_language_is_that_language(code: str, language: str) -> None:
    """Corpora name their languages by either; the tag stays as it is written."""
    for ending in ("", "-Latn", "_latn_xx"):
        tag = parse_language(f"{code}{ending}")
        assert tag == f"{code}{ending}"
        spelled = {"numbers": "spell"}
        assert text_table(tag, spelled) == text_table(f"{language}{ending}", spelled)
        assert language_code(tag) == whisper_language(tag) == language
    assert single_language_tag([code, language]) == code


def test_words_of_members_of_a_language_keep_their_letters() -> None:
    assert normalize("Tog' O'zbek", "uzn") == normalize("Tog' O'zbek", "uz") == "tog' o'zbek"
    assert normalize("'Yan", "fuv") == normalize("'Yan", "ff") == "'yan"
    assert normalize("QIZ", "azj") == "qız"


def test_language_tags_of_one_and_several_languages() -> None:
    assert language_tags(["en", "es", "en", "EN"]) == ("en", "es")
    assert (single_language_tag(["en", "es"]), single_language_tag(["en"])) == ("", "en")
    assert single_language_tag(["de", "de-AT"]) == "de"
    with pytest.raises(SbkitError, match="empty list"):
        language_tags([])
