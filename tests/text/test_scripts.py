"""Transcripts in another script, and characters that a model hardly ever sees."""

from sbkit.text.scripts import in_another_script, rare_characters, script_of, texts_by_script


def test_letters_have_a_script_and_other_characters_none() -> None:
    scripts = [script_of(char) for char in "aéжαאعकจ한あア中1 .'\u0301"]
    east = ["EAST ASIAN"] * 4
    assert scripts == [
        *("LATIN", "LATIN", "CYRILLIC", "GREEK", "HEBREW", "ARABIC", "DEVANAGARI", "THAI"),
        *east,
        *("", "", "", "", ""),
    ]


def test_texts_of_another_script_are_found() -> None:
    texts = ["yes", "no", "да", "不", "yes да", "12", "été"]
    assert texts_by_script(texts) == {"LATIN": 4, "CYRILLIC": 2, "EAST ASIAN": 1}
    assert in_another_script(texts) == [2, 3, 4]
    assert in_another_script(["ラーメン が 食", "한 字"]) == []


def test_rare_characters_are_counted() -> None:
    assert rare_characters(["abba", "aczz"], at_most=2) == {"b": 2, "c": 1, "z": 2}
    assert rare_characters(["abba", "aczz"], at_most=1) == {"c": 1}
