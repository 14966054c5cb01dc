"""Score token sequences by the attention decoder of a model, one utterance at a time.

Legend: N sequences, L tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sbkit.decoding.frames import Hypothesis

Tokens = tuple[int, ...]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class AttentionDecoder:
    """Score token sequences of one utterance, each sequence once.

    log_probs: computes ln p of every token after each prefix of a sequence,
    (N, L) -> (N, L + 1, V); eos: what ends a sequence.
    """

    def __init__(self, *, log_probs: Callable[[Counts], Floats], eos: int) -> None:
        self._log_probs, self._eos = log_probs, eos
        self._known = dict[Tokens, float]()

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens and their end | audio) of each sequence."""
        new = [each for each in dict.fromkeys(sequences) if each not in self._known]
        if new:
            self._known |= zip(new, self._score(new), strict=True)
        return [self._known[each] for each in sequences]

    def next_log_probs(self, prefixes: Sequence[Tokens]) -> Floats:
        """Score every next token of prefixes of one length, the end included: -> (N, V)."""
        tokens = np.array(prefixes, dtype=np.int64).reshape(len(prefixes), -1)
        return self._log_probs(tokens)[:, -1]

    def _score(self, sequences: Sequence[Tokens]) -> list[float]:
        lengths = np.array([len(each) for each in sequences])
        wanted = np.full((len(sequences), lengths.max() + 1), self._eos)
        for row, each in zip(wanted, sequences, strict=True):
            row[: len(each)] = each
        log_probs = self._log_probs(wanted[:, :-1])
        of_each = np.take_along_axis(log_probs, wanted[..., None], axis=2)[..., 0]
        counted = np.arange(wanted.shape[1]) <= lengths[:, None]  # the tokens and one end
        totals: list[float] = np.where(counted, of_each, 0.0).sum(1).tolist()
        return totals


def rescore(
    hypotheses: Sequence[Hypothesis], attention: AttentionDecoder, weight: float
) -> list[Hypothesis]:
    """Add the attention decoder's weighted scores, and return the best hypothesis first.

    Source: Watanabe et al. 2017 (hybrid CTC/attention), section "rescoring".
    """
    if not hypotheses:
        return []
    scores = attention.score([each.tokens for each in hypotheses])
    added = [
        replace(each, score=each.score + weight * score, attention_score=weight * score)
        for each, score in zip(hypotheses, scores, strict=True)
    ]
    return sorted(added, key=lambda each: each.score, reverse=True)
