"""Language models are trained once or read from ARPA, stored, and refused if damaged."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sbkit.base.arrays import Array
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.lm import training
from sbkit.lm.arpa import is_arpa, read_arpa, write_arpa
from sbkit.lm.kneser_ney import train
from sbkit.lm.language_models import load, load_language_models, save
from sbkit.lm.ngram import NgramModel
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.by_definition import sentence_log_prob
from tests.decoding.spoken import TEXTS, char_tokenizer, train_models

DATA = Path(__file__).parent / "data"
SENTENCES = [*map(str.split, (DATA / "sentences.txt").read_text().splitlines())]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return char_tokenizer(tmp_path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lm.safetensors"


def test_models_learn_from_as_much_text_as_fits_into_memory(
    file: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They say so before they are trained, and the same sentences are drawn again."""
    caplog.set_level("INFO")
    monkeypatch.setattr(training, "MAX_LM_TEXT_BYTES", {"words": 200, "tokens": 100})
    messages = train_models(file, tokenizer)
    first = file.read_bytes()
    sizes = [("words", 9), ("tokens", 4)]
    assert caplog.messages == [
        f"language model of {name}: training on {count} of 12 sentences" for name, count in sizes
    ]
    assert "46 words in 9 sentences" in messages[0] and "85 tokens in 4 sentences" in messages[1]
    train_models(file, tokenizer, source="again")
    made_from = rb'"made_from":"\w+"'
    assert re.sub(made_from, b"", file.read_bytes()) == re.sub(made_from, b"", first)


def test_text_in_other_letters_does_not_replace_models(file: Path, tokenizer: Tokenizer) -> None:
    train_models(file, tokenizer)
    before = file.read_bytes()
    with pytest.raises(SbkitError, match="100.0% of the text's words have letters that no"):
        train_models(file, tokenizer, ["птица поёт"], source="others")
    assert file.read_bytes() == before
    messages = train_models(file, tokenizer, [*TEXTS, "птица"], source="both")
    assert messages[-1] == "1.6% of the text's words have letters that no token spells"
    messages = train_models(file, tokenizer, ["cold дома"], source="half of the letters")
    assert messages[-1] == "50.0% of the text's words have letters that no token spells"


def test_only_the_named_order_changes(file: Path, tokenizer: Tokenizer) -> None:
    train_models(file, tokenizer, words=2, tokens=3)
    text = training.LmText(sentences=lambda: TEXTS)
    encoder = training.LmTextEncoder(tokenizer=tokenizer)
    for name, order in (("words", 3), ("tokens", 0)):
        training.replace_language_models(file, text, {name: order}, encoder)
    assert {name: model.order for name, model in load(file)[0].items()} == {"words": 3}


def test_chinese_text_with_a_rare_character_in_each_sentence_is_learned(tmp_path: Path) -> None:
    """Between spaces there are whole sentences, so most of them have one."""
    tokenizer = char_tokenizer(tmp_path, ["今天天气很好", "我们去北京吧"])
    messages = train_models(tmp_path / "lm", tokenizer, ["今天天气很冷", "我们去上海吧"], words=0)
    assert messages[-1] == "100.0% of the text's words have letters that no token spells"


@pytest.mark.parametrize("name", ["words", "tokens"])
def test_arpa_file_replaces_model_of_its_kind(file: Path, tokenizer: Tokenizer, name: str) -> None:
    """The other model is trained on the transcripts."""
    arpa = file.with_name("talks.arpa")
    train_models(file, tokenizer)
    written = getattr(load_language_models(file, tokenizer), name)
    write_arpa(written, arpa)
    messages = train_models(file, tokenizer, source=name, arpa=arpa)
    assert messages[0] == f"language model of {name}: {arpa}"
    model = getattr(load_language_models(file, tokenizer), name)
    assert (model.words, model.order) == (written.words, written.order)


def test_arpa_file_of_other_order_or_spelling_is_refused(file: Path, tokenizer: Tokenizer) -> None:
    arpa = file.with_name("talks.arpa")
    write_arpa(train([text.split() for text in TEXTS], order=2).model, arpa)
    with pytest.raises(SbkitError, match="2-gram model of words. Set `word_lm_order: 2`"):
        train_models(file, tokenizer, [], words=3, arpa=arpa)
    write_arpa(train([text.upper().split() for text in TEXTS], order=2).model, arpa)
    with pytest.raises(SbkitError, match="spell only 0 of the 11 words of .* Train it on text"):
        train_models(file, tokenizer, [], arpa=arpa)
    write_arpa(train([["cold", "office", "COLD", "OFFICE"]], order=2).model, arpa)
    with pytest.raises(SbkitError, match="spell only 2 of the 4 words"):
        train_models(file, tokenizer, [], arpa=arpa)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("a.arpa", "any", True), ("irst.lm", "iARPA\n\n\\data\\\n", True), ("a.txt", "data\n", False)],
)
def test_is_arpa_checks_name_and_data(tmp_path: Path, name: str, text: str, expected: bool) -> None:
    (tmp_path / name).write_text(text)
    assert is_arpa(tmp_path / name) is expected


def test_binary_of_kenlm_is_refused_and_not_taken_for_text(tmp_path: Path) -> None:
    binary = tmp_path / "lm.bin"
    binary.write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0\x80\xff")
    with pytest.raises(SbkitError, match="Name the ARPA file that it was made from"):
        is_arpa(binary)


# -- `sbkit lm`


def test_lm_command_normalizes_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "new/words.arpa"
    text.write_text("The bird sings.\n\nA bird, a tree!\nThe tree sings\n")
    assert sbkit(["lm", str(text), "--language=en", "--order=2", "--out", str(out)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("language model of words: 2-grams of 10 words in 3 sentences, 5 ")
    model = read_arpa(out)
    assert (model.order, model.words[3:]) == (2, ("a", "bird", "sings", "the", "tree"))


def test_lm_command_refuses_unusable_input(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "x.arpa"
    cases: list[tuple[bytes, list[str], str]] = [
        (b"", [], "at least one word"),
        (b"a\nb \xff", [], "line 2 .*utf-8"),
        (b"\\data\\\nngram 1=1", [], "is an ARPA file"),
        (b"a b", ["--order=0"], "order of a language model must be from 1 to 10, but is 0"),
        (b"a b", ["--tokenizer", "nowhere"], "sentencepiece model must be readable"),
    ]
    for content, options, message in cases:
        text.write_bytes(content)
        with pytest.raises(SbkitError, match=message):
            sbkit(["lm", str(text), "--out", str(out), *options])
        assert not out.exists()


def test_lm_command_normalizes_and_spells_a_text_like_the_transcripts_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """English transcripts have "naive" for "naïve"; without a language, no token spells the ï."""
    tokenizer = char_tokenizer(tmp_path, ["a naive bird"])
    text, out = tmp_path / "a.txt", tmp_path / "tokens.arpa"
    command = ["lm", str(text), "--tokenizer", str(tmp_path), "--out", str(out)]
    (tmp_path / "hyperparams.yaml").write_text("language: en\n")
    text.write_text("птица поёт\n" * 9)
    with pytest.raises(SbkitError, match="tokens cannot spell the text"):
        sbkit(command)
    assert not out.exists()
    text.write_text("A naïve bird\n" * 9)
    assert sbkit(command) == 0
    assert {*read_arpa(out).words[3:]} <= {*tokenizer.pieces()}
    assert "no token spells" not in capsys.readouterr().out
    assert sbkit([*command, "--language=und"]) == 0
    assert "33.3% of the text's words have letters that no token spells" in capsys.readouterr().out


# -- the file


@pytest.fixture(scope="module")
def models() -> dict[str, NgramModel]:
    texts = ["".join(words) for words in SENTENCES]
    return {"words": train(SENTENCES, order=3).model, "tokens": train(texts, order=2).model}


def test_save_and_load_keep_the_models(file: Path, models: dict[str, NgramModel]) -> None:
    save(models, file, metadata={"tokenizer": "x"})
    loaded, metadata, _ = load(file)
    assert metadata["tokenizer"] == "x"
    assert {name: model.order for name, model in loaded.items()} == {"words": 3, "tokens": 2}
    for words in SENTENCES:
        expected = sentence_log_prob(models["words"], words)
        assert sentence_log_prob(loaded["words"], words) == expected


def change(file: Path, name: str, array: Array, **orders: object) -> None:
    arrays = safetensors.numpy.load_file(file) | {name: array}
    metadata = {"orders": json.dumps({"words": 3, "tokens": 2} | orders)}
    safetensors.numpy.save_file(arrays, file, metadata=metadata)


def change_value(field: str, index: int, value: float) -> Callable[[Path], None]:
    def change_file(file: Path) -> None:
        array = safetensors.numpy.load_file(file)[f"words.{field}_2"].copy()
        array[index] = value
        change(file, f"words.{field}_2", array)

    return change_file


FEW = np.zeros(4, np.int64)
DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "no metadata": lambda file: safetensors.numpy.save_file({"a": np.zeros(2)}, file),
    "an order of thousands": lambda file: change(file, "more", FEW, words=5000),
    "floats for keys": lambda file: change(file, "words.keys_2", FEW.astype(np.float32)),
    "other first words": lambda file: change(file, "words.words", np.frombuffer(b"a\nb", np.uint8)),
    "unsorted": lambda file: change(file, "words.keys_2", FEW),
    "another size": lambda file: change(file, "words.log_probs_1", np.zeros(3, np.float32)),
    "not a number": change_value("log_probs", -1, np.nan),
    "before the words": change_value("keys", 0, -1),
    "beyond the words": change_value("keys", -1, 1 << 60),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_refuses_damaged_file(file: Path, models: dict[str, NgramModel], damage: str) -> None:
    save(models, file, metadata={})
    DAMAGES[damage](file)
    with pytest.raises(SbkitError, match="is not a file of language models, or is damaged"):
        load(file)
