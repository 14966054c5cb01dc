"""Each row tells how a prompt that is written in digits is read aloud."""

import pytest

from recipes.AsteriskPrompts.corpus import spell_digits

CASES = [
    ("en", "press 1", "press one"),
    ("en", "Press 0, or 10.", "Press zero, or ten."),
    ("en", "dial 500 now", "dial five hundred now"),
    ("en", "101 times", "one hundred and one times"),
    ("en", "extension 1234", "extension twelve thirty-four"),
    ("en", "dial 8500", "dial eighty-five hundred"),
    ("en", "agent 007", "agent zero zero seven"),
    ("en", "28.8 kilobit", "twenty-eight point eight kilobit"),
    ("en", "the 3rd and 21st", "the third and twenty-first"),
    ("en", "H.323", "H three two three"),
    ("en", "IAX2 3D", "IAX two three D"),
    ("en", "press * or #", "press star or pound"),
    ("es", "marque 1", "marque uno"),
    ("fr", "appuyez sur 21 #", "appuyez sur vingt et un dièse"),
    ("it", "premere 8", "premere otto"),
    ("ru", "нажмите 2", "нажмите два"),
]


@pytest.mark.parametrize(("language", "text", "expected"), CASES)
def test_spell_digits(language: str, text: str, expected: str) -> None:
    assert spell_digits(text, language) == expected
