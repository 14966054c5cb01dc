"""The times of words are the same for every decoder."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from sbkit.base.arrays import LogProbs
from sbkit.bundle.bundle import Bundle
from sbkit.bundle.protocols import Encoded
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.greedy import best_tokens
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.torch_model import TorchModel
from sbkit.text.tokenizer import SPACE
from sbkit.text.word import Word
from tests.decoding.spoken import train_models
from tests.runtime.bundles import make_bundle

SPOKEN = "hello▁▁▁▁▁▁▁▁▁▁▁▁there▁there"  # from frame 10 on, two frames for each token


def log_probs_of(bundle: Bundle) -> LogProbs:
    """Return log-probabilities (U, V) in which SPOKEN is nearly certain.

    The last of the twelve spaces could also be the start of the t.
    """
    pieces = bundle.tokenizer.pieces()
    best = np.zeros(100, np.int64)
    for index, letter in enumerate(SPOKEN):
        best[10 + 2 * index] = pieces.index(letter)
    scores = np.full((100, len(pieces)), 0.001) + 0.9 * np.eye(len(pieces))[best]
    scores[42, [pieces.index(SPACE), pieces.index("t")]] = 0.5, 0.4
    scores[43, [0, pieces.index("t")]] = 0.6, 0.3
    return np.log(scores).astype(np.float32)


def make_decoder(loaded: Bundle, folder: Path) -> BeamDecoder:
    """Return a beam decoder whose token model has never seen two spaces in a row."""
    file = folder / "lm.safetensors"
    texts = ["hello there there", "a quick brown fox"]
    train_models(file, loaded.tokenizer, texts, words=0)
    return BeamDecoder(
        tokenizer=loaded.tokenizer, language_models=file, weights={"token": 10.0, "token_bonus": 0}
    )


def tokens_of(loaded: Bundle) -> str:
    """Decode the clip and return its tokens unchanged."""
    log_probs = log_probs_of(loaded)
    if loaded.decoder is None:
        ids = best_tokens(log_probs, loaded.tokenizer.vocabulary.blank)
    else:
        ids = list(loaded.decoder.nbest(log_probs)[0].tokens)
    return "".join(map(loaded.tokenizer.piece, ids))


def recognize(loaded: Bundle, words: str | None = None) -> tuple[Word, ...]:
    """Recognize the clip, or align words with it."""
    clip = [np.zeros(64_000, np.int16)]
    with patch.object(TorchModel, "encode", lambda *_: [Encoded(log_probs_of(loaded))]):
        if words is None:
            return loaded.recognize(clip, times=True)[0].words
        return loaded.align(clip, [words])[0]


def test_word_times_do_not_depend_on_the_decoder(tmp_path: Path) -> None:
    """Greedy decoding emits twelve spaces, a beam one; the times follow from the text."""
    loaded = load_bundle(make_bundle(tmp_path))
    words = recognize(loaded)
    assert [word.text for word in words] == ["hello", "there", "there"]
    beam = replace(loaded, decoder=make_decoder(loaded, tmp_path))
    spaces = [tokens_of(decoding).count(SPACE) for decoding in (loaded, beam)]
    assert spaces == [13, 2]
    assert recognize(beam) == words
    assert recognize(loaded, "hello there there") == words
