"""Known language tags are accepted; errors say how to write others."""

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.languages import language_tags, parse_language, single_language_tag


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


def test_language_tags_of_one_and_several_languages() -> None:
    assert language_tags(["en", "es", "en", "EN"]) == ("en", "es")
    assert (single_language_tag(["en", "es"]), single_language_tag(["en"])) == ("", "en")
    assert single_language_tag(["de", "de-AT"]) == "de"
    with pytest.raises(SbkitError, match="empty list"):
        language_tags([])
