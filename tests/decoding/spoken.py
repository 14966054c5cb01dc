"""A tokenizer, language models and log-probabilities of a few texts, for tests of decoders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.base.arrays import LogProbs
from sbkit.decoding.beam import BeamDecoder
from sbkit.decoding.fit import ValidationUtterance
from sbkit.decoding.word_times import WordAligner
from sbkit.lm.language_models import TOKENS, WORDS
from sbkit.lm.training import LmText, LmTextEncoder, ensure_language_models
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer

TEXTS = [
    "call the north office",
    "send it to the office",
    "the north is cold",
    "call me in the north",
    "it is cold in the office",
    "send me to the north office",
] * 2


def char_tokenizer(folder: Path, texts: Sequence[str] = TEXTS) -> Tokenizer:
    return ensure_tokenizer(
        model_file=folder / "tokenizer.model",
        token_type="char",
        vocab_size=None,
        texts=lambda: texts,
    )


def make_aligner(tokenizer: Tokenizer, **options: Any) -> WordAligner:
    """Make an aligner of a model with frames of 40 ms at 16 kHz."""
    return WordAligner(tokenizer=tokenizer, samples_per_frame=640, sample_rate=16_000, **options)


def train_models(
    file: Path,
    tokenizer: Tokenizer,
    texts: Sequence[str] = TEXTS,
    *,
    words: int = 2,
    tokens: int = 3,
    source: str = "these",
    arpa: Path | None = None,
) -> list[str]:
    """Train language models of some orders in a file, and return the messages about them."""
    return ensure_language_models(
        file,
        LmText(arpa=arpa, source=source, sentences=lambda: texts),
        {WORDS: words, TOKENS: tokens},
        LmTextEncoder(tokenizer=tokenizer),
    )


def spoken(tokenizer: Tokenizer, text: str, confused: dict[int, str]) -> LogProbs:
    """Make log-probabilities of a text; ``confused``: by index, a letter that is likelier."""
    tokens = tokenizer.encode(text)
    probs = np.full((2 * len(tokens), tokenizer.vocab_size), 1e-4)
    for index, token in enumerate(tokens):
        probs[2 * index, token] = 0.45 if index in confused else 1.0
        if index in confused:
            probs[2 * index, tokenizer.encode(confused[index])[-1]] = 0.55
        probs[2 * index + 1, tokenizer.vocabulary.blank] = 1.0
    return np.asarray(np.log(probs / probs.sum(1, keepdims=True)))


def silence(tokenizer: Tokenizer, frames: int, *, blank: float = 0.9) -> LogProbs:
    """Make log-probabilities of frames in which an uncertain model hears nothing: (U, V)."""
    probs = np.full((frames, tokenizer.vocab_size), (1 - blank) / (tokenizer.vocab_size - 1))
    probs[:, tokenizer.vocabulary.blank] = blank
    return np.asarray(np.log(probs))


def misheard(tokenizer: Tokenizer) -> list[ValidationUtterance]:
    """Make six utterances; in each, two letters sound more like others."""
    random, letters, utterances = np.random.default_rng(0), [*"acdefhilmnorst"], []
    for text in TEXTS[:6]:
        indices = [index for index, letter in enumerate(text) if letter != " "]
        confused = {int(n): str(random.choice(letters)) for n in random.choice(indices, 2)}
        utterances.append(ValidationUtterance(spoken(tokenizer, text, confused), text))
    return utterances


def transcribe(decoder: BeamDecoder, log_probs: LogProbs) -> str:
    return decoder.tokenizer.decode(decoder.nbest(log_probs)[0].tokens)
