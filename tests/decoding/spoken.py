"""Log-probabilities of a text that somebody said, for the tests of decoders."""

import numpy as np

from sbkit.decoding.decoder import BeamDecoder
from sbkit.decoding.frames import LogProbs
from sbkit.text.tokenizer import Tokenizer


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
