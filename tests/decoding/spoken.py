"""Tokenizers, language models and log-probabilities of a few texts, for the tests of decoders."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.frames import LogProbs
from sbkit.decoding.language_models import TOKENS, WORDS, ensure_language_models
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer


def char_tokenizer(folder: Path, texts: Sequence[str]) -> Tokenizer:
    """Train a tokenizer of characters in a folder."""
    return ensure_tokenizer(
        model_file=folder / "tokenizer.model", kind="char", vocab_size=None, texts=lambda: texts
    )


def train_models(
    file: Path,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    words: int = 2,
    tokens: int = 3,
    source: str = "these",
    arpa: Path | None = None,
) -> list[str]:
    """Train language models of some orders in a file, and return the messages about them."""
    return ensure_language_models(
        file,
        source=source,
        orders={WORDS: words, TOKENS: tokens},
        texts=lambda: texts,
        tokenizer=tokenizer,
        arpa=arpa,
    )


def spoken(tokenizer: Tokenizer, text: str, other: dict[int, str]) -> LogProbs:
    """Write the log-probabilities of a text, in which some letters sound almost like others."""
    tokens = tokenizer.encode(text)
    probs = np.full((2 * len(tokens), tokenizer.vocab_size), 1e-4)
    for place, token in enumerate(tokens):
        probs[2 * place, token] = 0.45 if place in other else 1.0
        if place in other:
            probs[2 * place, tokenizer.encode(other[place])[-1]] = 0.55
        probs[2 * place + 1, tokenizer.vocabulary.blank] = 1.0
    scores: LogProbs = np.log(probs / probs.sum(1, keepdims=True))
    return scores


def heard(decoder: BeamDecoder, log_probs: LogProbs) -> str:
    """Decode one utterance."""
    return decoder.tokenizer.decode(decoder.nbest(log_probs)[0].tokens)
