"""Language models are trained again for other data, and the weights fitted with them removed."""

from pathlib import Path

import pytest

from recipes.asr.data import prepare_language_models
from sbkit.data.splits import Splits
from sbkit.decoding.decoder import DECODER_FILE, LANGUAGE_MODELS_FILE
from sbkit.decoding.words import CONFIDENCE_FILE
from sbkit.lm.language_models import load_language_models
from sbkit.lm.ngram import SPECIAL
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer
from tests.stores import Utterance, make_store


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return ensure_tokenizer(
        model_file=tmp_path / "tokenizer.model",
        kind="char",
        vocab_size=None,
        texts=lambda: ["call the office"],
    )


def test_weights_fitted_with_other_language_models_are_removed(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "talks.txt"
    knobs: dict[str, object] = {"language": "en", "word_lm_order": 2, "token_lm_order": 0}
    knobs |= {"output_folder": str(tmp_path), "lm_text": str(text)}
    chosen = [tmp_path / DECODER_FILE, tmp_path / CONFIDENCE_FILE]
    for said, are_left in (("call the office", False), ("call the office", True), ("call", False)):
        text.write_text(said)
        for file in chosen:
            file.touch()
        prepare_language_models(knobs, Splits(None, {}, {}), tokenizer)  # type: ignore[arg-type]
        assert [file.exists() for file in chosen] == [are_left, are_left]
        assert ("of earlier models are removed" in caplog.text) is not are_left
        caplog.clear()


def test_other_training_data_gives_other_language_models(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Training splits may have any names, as those of LibriSpeech have."""
    knobs: dict[str, object] = {"language": "en", "word_lm_order": 2, "token_lm_order": 0}
    knobs |= {"output_folder": str(tmp_path)}
    for text, known in (("call", {"call"}), ("call", {"call"}), ("the office", {"the", "office"})):
        train = make_store([Utterance("a", text, text, "ann", 0, b"")])
        prints = {"train-clean-100": text, "dev-clean": "other"}
        splits = Splits(train, {"dev-clean": train}, {}, fingerprints=prints)
        prepare_language_models(knobs, splits, tokenizer)
        words = load_language_models(tmp_path / LANGUAGE_MODELS_FILE, tokenizer).words
        assert words is not None and {*words.words} == {*SPECIAL, *known}
