"""The attention decoder of a model scores the hypotheses of a beam.

Legend: U frames, V vocabulary, N sequences, L tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sbkit.base.arrays import Counts, Float64s
from sbkit.decoding.greedy import Hypothesis

Tokens = tuple[int, ...]


class AttentionScorer:
    """Score token sequences of one utterance with an attention decoder, each sequence once.

    log_probs: computes ln p of every token after each prefix of the sequences,
        (N, L) -> (N, L + 1, V).
    eos: the token that ends a sequence.

    >>> def uniform(tokens):
    ...     return np.log(np.full((len(tokens), tokens.shape[1] + 1, 4), 0.25))
    >>> decoder = AttentionScorer(log_probs=uniform, eos=3)
    >>> round(decoder.score([(1, 2)])[0], 2)  # 3 ln 0.25: two tokens and the end
    -4.16
    """

    def __init__(self, *, log_probs: Callable[[Counts], Float64s], eos: int) -> None:
        self._log_probs = log_probs
        self._eos = eos
        self._scores: dict[Tokens, float] = {}

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens, eos | audio) of each sequence."""
        unscored = [tokens for tokens in dict.fromkeys(sequences) if tokens not in self._scores]
        if unscored:
            lengths = np.array([len(tokens) for tokens in unscored])
            padded = np.full((len(unscored), lengths.max() + 1), self._eos)  # (N, L + 1)
            for row, tokens in zip(padded, unscored, strict=True):
                row[: len(tokens)] = tokens
            log_probs = self._log_probs(padded[:, :-1])  # (N, L + 1, V)
            token_scores = np.take_along_axis(log_probs, padded[:, :, None], axis=2).squeeze(2)
            is_counted = np.arange(padded.shape[1]) <= lengths[:, None]  # tokens and the first eos
            scores = np.where(is_counted, token_scores, 0.0).sum(1).tolist()
            self._scores |= zip(unscored, scores, strict=True)
        return [self._scores[tokens] for tokens in sequences]


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionScorer, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first."""
    scores = attention.score([hypothesis.tokens for hypothesis in hypotheses])
    rescored: list[Hypothesis] = []
    for hypothesis, score in zip(hypotheses, scores, strict=True):
        added = weight * score
        total = hypothesis.score + added
        rescored.append(replace(hypothesis, score=total, attention_score=added))
    return sorted(rescored, key=lambda hypothesis: hypothesis.score, reverse=True)
