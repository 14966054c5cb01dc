"""Transcripts: tags are dropped or kept as tokens, numbers may become words; sentences are cut."""

from functools import partial
from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.text.normalization import text_table
from sbkit.text.tokenizer import ensure_tokenizer
from sbkit.text.transcripts import (
    parse_tag_names,
    select_tags,
    split_text,
    transcript_normalizer,
)

KEPT = ("noise", "laughter", "unclear_speech")
TEXTS = {  # a transcript, without its tags, and with those that are kept
    "Well [disfluency] I [Noise] see.": ("Well I see.", "Well I [noise] see."),
    "a [um [laughter]] b": ("a b", "a [laughter] b"),
    "a [ unclear  speech ] b": ("a b", "a [unclear_speech] b"),
    "a [noise b": ("a b", "a [noise] b"),
    "a [noise [laughter]] b": ("a b", "a [noise] [laughter] b"),
    "[[noise] a": ("a", "[noise] a"),
    "a noise] b": ("a b", "a [noise] b"),
    "a [ b ] c [": ("a c", "a c"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_tags_are_dropped_unless_they_are_kept(text: str) -> None:
    assert (select_tags(text), select_tags(text, KEPT)) == TEXTS[text]


@pytest.mark.parametrize(("kind", "size"), [("char", None), ("bpe", 30), ("unigram", 23)])
def test_a_kept_tag_is_one_token_and_a_word(kind: str, size: int | None, tmp_path: Path) -> None:
    texts = ["good day [noise] to you", "[laughter] noise is a word", "hello [noise]"] * 9
    ensure = partial(ensure_tokenizer, token_type=kind, vocab_size=size, texts=lambda: texts)
    tokenizer = ensure(model_file=tmp_path / "two.model", tags=("noise", "laughter"))
    assert tokenizer.tags == ("noise", "laughter")
    ids = tokenizer.encode("hello [noise] [laughter] noise")
    assert [tokenizer.piece(id) for id in ids].count("[noise]") == 1
    assert tokenizer.decode(ids) == "hello [noise] [laughter] noise"
    with pytest.raises(SbkitError, match="`keep_tags` names sneeze, which no transcript"):
        ensure(model_file=tmp_path / "three.model", tags=("noise", "laughter", "sneeze"))


WRITTEN = {  # a transcript, as it is trained, and the tags that are dropped
    "Hello [noise] <unk> there": ("hello there", ["[noise]", "<unk>"]),
    "(Laughter) so {cough} it goes </s>": ("so it goes", ["(Laughter)", "{cough}", "</s>"]),
    "Tom &amp; Ann &#39;n&#x27; me": ("tom and ann n me", []),
    "&lt;unk&gt; AT&T; R&B": ("at and t r and b", ["<unk>"]),
    "yes (he said so) a < b and c > d": ("yes he said so a b and c d", []),
    "<noise> (background noise) {Laughter}": ("[noise] [laughter]", ["(background noise)"]),
    "\uff08laughter\uff09 yes \uff3bnoise\uff3d": ("yes", ["(laughter)", "[noise]"]),
    "\uff08yes\uff09 no": ("yes no", []),
    "(gasps) oh (crowd cheering)": ("oh", ["(gasps)", "(crowd cheering)"]),
    # Whisper, HTK, Kaldi, GigaSpeech, Switchboard, LDC, NIST, CHAT, Verbmobil
    "<|en|><|0.00|> yes<|2.00|>": ("yes", ["<|en|>", "<|0.00|>", "<|2.00|>"]),
    "!SIL so SPN <s> it </s> !Hola!": ("so it hola", ["!SIL", "SPN", "<s>", "</s>"]),
    "SO <COMMA> <SIL> YES <PERIOD>": ("so yes", ["<SIL>"]),
    "[laughter-yes] [vocalized-noise] {F uh, }": ("yes uh", ["[vocalized-noise]"]),
    "%uh, (%um) 50 %of, % of (%hesitation)": ("uh um 50 percent of percent of", ["%hesitation"]),
    "&=clears:throat &-um &+fr so xxx, R&D": ("um so r and d", ["&=clears:throat", "&+fr", "xxx"]),
    "<I go> [/] I (.) go +/. www.x.uk +...": ("i go i go www x uk", ["[/]", "(.)", "+/.", "+..."]),
    "[=! noise] &=laughter !SIL": ("[noise] [laughter]", ["!SIL"]),
    "++cough++ *laughs* #noise <#click>": ("", ["++cough++", "*laughs*", "#noise", "<#click>"]),
    "2 * 3 *really* f*** C++ #five": ("2 3 really f c five", []),
    r"it&amp;amp;#39;s it\'s it\\'s &#38;amp;": ("it's it's it's and", []),
    r"caf\u00e9 \ud83d\ude00 \ud83d": ("cafe", []),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_tags_of_any_brackets_are_dropped_and_counted(text: str) -> None:
    """`<unk>` and `(laughter)` were trained as the spoken words, and `&amp;` as "and amp"."""
    expected, dropped = WRITTEN[text]
    kept = ("noise", "laughter") if "[" in expected else ()
    assert transcript_normalizer(text_table("en"), kept)(text) == expected
    noted: list[str] = []
    select_tags(text, kept, noted.append)
    assert [*dict.fromkeys(noted)] == dropped


def test_names_of_tags_are_checked() -> None:
    assert parse_tag_names(["Noise", "noise"]) == ("noise",)
    for value in ("noise", ["[noise]"], ["a b"]):
        with pytest.raises(SbkitError, match=r"`keep_tags` must be a list .* without their bracke"):
            parse_tag_names(value)


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("de", "Das kostet 3,50 Euro!", "das kostet drei komma fünf null euro"),
        (
            "en",
            "In 1999 I paid $5 [noise] for 50%",
            "in nineteen ninety nine i paid five dollars for fifty percent",
        ),
    ],
)
def test_numbers_are_spelled_if_the_yaml_says_so(language: str, text: str, expected: str) -> None:
    table = text_table(language, {"numbers": "spell"})
    spell = transcript_normalizer(table)
    assert spell(text) == expected
    assert spell(expected) == expected
    assert any(map(str.isdecimal, transcript_normalizer(text_table(language))(text)))


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "$5 million, 5 million €, 3 bn. £, $5", "5 million 5 million 3 bn five dollars"),
        (
            "en",
            "\N{YEN SIGN}500 2½ 5² 5° 12 345, 5 and $6",
            "500 2 5 5 12 345 five and six dollars",
        ),
        ("de", "5 Mio. € und 5 Millionen €", "5 mio und 5 millionen"),
        ("fr", "5 M€, 5 millions d'€, 5 £", "5 m 5 millions d 5"),
        ("es", "5 millones de €", "5 millones de"),
        ("it", "5 milioni €, 5 €", "5 milioni cinque euro"),
        ("ru", "5 млн ₽", "5 млн"),
    ],
)
def test_numbers_that_are_not_read_whole_stay(language: str, text: str, expected: str) -> None:
    """Digits and the dropped symbol are noted; "five million" for "$5 million" was not."""
    table = text_table(language, {"numbers": "spell"})
    assert transcript_normalizer(table)(text) == expected


def test_marks_and_capitals_stay_beside_numbers() -> None:
    marks = [".", ",", "，", "。"]
    for language, text, expected in (
        ("en", "Well, I saw 12.", "Well, I saw twelve."),
        ("en", "SO <COMMA> I <NOISE> SAW 12 <PERIOD>", "SO, I SAW twelve."),
        ("zh", "你好，世界<noise>。", "你好，世界。"),
    ):
        numbers = "spell" if language == "en" else "keep"
        table = text_table(language, {"case": "keep", "punctuation": marks, "numbers": numbers})
        assert transcript_normalizer(table)(text) == expected


def test_numbers_of_another_language_are_refused() -> None:
    with pytest.raises(SbkitError, match=r"`text.numbers: spell` reads .*, but `language` is pl"):
        transcript_normalizer(text_table("pl", {"numbers": "spell"}))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ('Mr. Wu said: "Yes."  He\nleft\n\nEnd', ['Mr. Wu said: "Yes."', "He left", "End"]),
        ("今天很好。他说。「好。」走", ["今天很好。", "他说。", "「好。」", "走"]),
        ("मैं घर गया। वह आया।", ["मैं घर गया।", "वह आया।"]),
        ("word " * 99 + "then, " + "more " * 99, None),
    ],
)
def test_text_is_split_into_sentences(text: str, sentences: list[str] | None) -> None:
    parts = split_text(text, seconds=200 if sentences is None else 5)
    if sentences is None:
        assert max(map(len, parts)) <= 100
        assert " ".join(parts).split() == text.split()
        assert "then," in {part.split()[-1] for part in parts}
    else:
        assert parts == sentences


def test_short_text_of_a_long_recording_is_not_cut_into_words() -> None:
    assert split_text("One two, three. ... ?!", seconds=600) == ["One two, three.", "...", "?!"]
