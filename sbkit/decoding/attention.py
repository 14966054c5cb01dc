"""The attention decoder of a model, which rescores the hypotheses of CTC, one utterance at a time.

Legend: N sequences, L tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sbkit.base.arrays import Counts, Float64s
from sbkit.decoding.frames import Hypothesis

Tokens = tuple[int, ...]


class AttentionDecoder:
    """Score token sequences of one utterance, each sequence once.

    log_probs: computes ln p of every token after each prefix of a sequence,
    (N, L) -> (N, L + 1, V); eos: the token that ends a sequence.

    >>> def uniform(tokens):
    ...     return np.log(np.full((len(tokens), tokens.shape[1] + 1, 4), 0.25))
    >>> decoder = AttentionDecoder(log_probs=uniform, eos=3)
    >>> round(decoder.score([(1, 2)])[0], 2)  # 3 ln 0.25: two tokens and the end
    -4.16
    """

    def __init__(self, *, log_probs: Callable[[Counts], Float64s], eos: int) -> None:
        self._log_probs, self._eos = log_probs, eos
        self._scores: dict[Tokens, float] = {}

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens and their end | audio) of each sequence."""
        new = [tokens for tokens in dict.fromkeys(sequences) if tokens not in self._scores]
        if new:
            self._scores |= zip(new, self._compute(new), strict=True)
        return [self._scores[tokens] for tokens in sequences]

    def _compute(self, sequences: Sequence[Tokens]) -> list[float]:
        lengths = np.array([len(tokens) for tokens in sequences])
        padded = np.full((len(sequences), lengths.max() + 1), self._eos)  # (N, L + 1)
        for row, tokens in zip(padded, sequences, strict=True):
            row[: len(tokens)] = tokens
        log_probs = self._log_probs(padded[:, :-1])
        token_scores = np.take_along_axis(log_probs, padded[..., None], axis=2)[..., 0]
        is_counted = np.arange(padded.shape[1]) <= lengths[:, None]  # the tokens and one end
        totals: list[float] = np.where(is_counted, token_scores, 0.0).sum(1).tolist()
        return totals


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionDecoder, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first."""
    if not hypotheses:
        return []
    scores = attention.score([hypothesis.tokens for hypothesis in hypotheses])
    rescored = [
        replace(hypothesis, score=hypothesis.score + weight * score, attention_score=weight * score)
        for hypothesis, score in zip(hypotheses, scores, strict=True)
    ]
    return sorted(rescored, key=lambda hypothesis: hypothesis.score, reverse=True)
