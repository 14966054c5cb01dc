"""The beam decoder: hotwords, streaming, and the settings that it refuses."""

from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import ConfigError
from sbkit.decoding.decoder import AttentionDecoder, BeamDecoder
from sbkit.decoding.greedy import GreedyDecoder
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.spoken import char_tokenizer, misheard, spoken, train_models, transcribed


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return char_tokenizer(tmp_path)


def test_hotword_that_is_in_no_text_is_recognized(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The utterance is "call lam"; its l sounds a little more like a t."""
    file = tmp_path / "lm.safetensors"
    train_models(file, tokenizer, tokens=0)
    plain = BeamDecoder(tokenizer=tokenizer, language_models=file, weights={"token": 0})
    log_probs = spoken(tokenizer, "call lam", {5: "t"})
    assert transcribed(plain.with_hotwords(["lam"]), log_probs) == "call lam"
    assert transcribed(plain, log_probs) != "call lam"


@pytest.mark.parametrize("variant", ["greedy", "hotwords", "rescoring"])
def test_stream_of_frames_is_decoded_as_the_whole_clip(
    tmp_path: Path, tokenizer: Tokenizer, variant: str
) -> None:
    file = tmp_path / "lm.safetensors"
    train_models(file, tokenizer)
    decoder: BeamDecoder | GreedyDecoder = BeamDecoder(
        tokenizer=tokenizer, language_models=file, attention_rescoring=variant == "rescoring"
    )
    attention = None
    if variant == "rescoring":
        attention = AttentionDecoder(
            log_probs=lambda tokens: -np.ones((len(tokens), tokens.shape[1] + 1, 99)), eos=2
        )
        with pytest.raises(TypeError, match="needs the attention decoder"):
            decoder.nbest(np.zeros((1, tokenizer.vocab_size)))
    elif variant == "hotwords":
        decoder = decoder.with_hotwords(["lam", "north"])
    elif variant == "greedy":
        decoder = GreedyDecoder(vocab_size=tokenizer.vocab_size, blank=tokenizer.vocabulary.blank)
    random = np.random.default_rng(3)
    for utterance in misheard(tokenizer):
        log_probs, state = utterance.log_probs, decoder.start()
        for part in np.split(log_probs, np.sort(random.integers(0, len(log_probs), 9))):
            state = decoder.advance(state, part)
        streamed, *_ = decoder.finish(state, attention)
        whole, *_ = decoder.nbest(log_probs, attention)
        assert streamed.tokens == whole.tokens
        assert streamed.score == pytest.approx(whole.score, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_type": "tree"}, "`decoder_type` must be beam or graph; got tree"),
        ({"attention_rescoring": "rescore"}, "must be True or False; got rescore"),
        ({"weights": {"words": 1}}, "must be numbers named word, .*; got {'words': 1}"),
        ({"weights": {"word": 1e9}}, "must be numbers named word, .*; got {'word': 1000000000.0}"),
    ],
)
def test_decoder_refuses_invalid_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BeamDecoder(tokenizer=None, language_models="x", **options)  # type: ignore[arg-type]
