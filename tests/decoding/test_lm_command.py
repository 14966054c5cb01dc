"""``sbkit lm`` writes a model of a text that other tools read."""

from pathlib import Path

import pytest

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.lm.arpa import read_arpa
from tests.decoding.spoken import char_tokenizer

TEXT = "The bird sings.\n\nA bird, a tree!\nThe tree sings\n"


def test_words_are_normalized_and_modelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    out = tmp_path / "new/words.arpa"
    assert (
        sbkit(["lm", str(tmp_path / "a.txt"), "--language=en", "--order=2", "--out", str(out)]) == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("language model of words: 2-grams of 10 words in 3 sentences, 5 ")
    model = read_arpa(out)
    assert model.order == 2
    assert model.words[3:] == ("a", "bird", "sings", "the", "tree")


def test_tokens_are_those_of_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    tokenizer = char_tokenizer(tmp_path / "run", ["the bird sings", "a tre"])
    out = tmp_path / "tokens.arpa"
    options = ["--language=en", "--order=4", "--out", str(out)]
    assert (
        sbkit(["lm", str(tmp_path / "a.txt"), *options, "--tokenizer", str(tmp_path / "run")]) == 0
    )
    assert set(read_arpa(out).words[3:]) <= set(tokenizer.pieces())


@pytest.mark.parametrize(
    ("content", "options", "what"),
    [
        (b"", [], "at least one word"),
        (b"\xff\xfe", [], "must be UTF-8"),
        (b"\\data\\\nngram 1=1", [], "is an ARPA file"),
        (b"a b", ["--tokenizer", "nowhere"], "The tokenizer, a sentencepiece model"),
    ],
)
def test_what_gives_no_model_is_refused(
    tmp_path: Path, content: bytes, options: list[str], what: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    out = tmp_path / "x.arpa"
    with pytest.raises(SbkitError, match=what):
        sbkit(["lm", str(tmp_path / "a.txt"), "--out", str(out), *options])
    assert not out.exists()


def test_the_text_is_normalized_and_spelled_as_the_transcripts_of_the_tokenizer_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of English writes naive; without a language the ï would be lost."""
    char_tokenizer(tmp_path, ["a naive bird"])
    text, out = tmp_path / "a.txt", tmp_path / "tokens.arpa"
    command = ["lm", str(text), "--tokenizer", str(tmp_path), "--out", str(out)]
    (tmp_path / "hyperparams.yaml").write_text("language: en\n")
    text.write_text("птица поёт\n" * 9)
    with pytest.raises(SbkitError, match="tokens spell, but 100.0% of its words"):
        sbkit(command)
    assert not out.exists()
    text.write_text("A naïve bird\n" * 9)
    assert sbkit(command) == 0
    assert "no token spells" not in capsys.readouterr().out
    assert sbkit([*command, "--language=und"]) == 0
    assert "33.3% of its words have letters that no token spells" in capsys.readouterr().out
