"""Score texts of an utterance with an attention decoder, which may also propose texts.

Legend: N sequences, L tokens.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from sbkit.base.arrays import Float64s, Int64s

Tokens = tuple[int, ...]


class AttentionScorer:
    """Score token sequences of one utterance with an attention decoder, each sequence once.

    score_texts: computes ln p of texts and their end, from the decoder's tokens, padded with
        ``end``: (N, L + 1) -> (N,).
    spell: converts tokens of CTC to the decoder's, for a decoder with its own tokenizer.
    propose: returns the texts that such a decoder generates, the best first, as tokens of CTC.
    """

    def __init__(
        self,
        *,
        score_texts: Callable[[Int64s], Float64s],
        end: int,
        spell: Callable[[Tokens], Sequence[int]] | None = None,
        propose: Callable[[], Sequence[Tokens]] | None = None,
    ) -> None:
        self._score_texts = score_texts
        self._end = end
        self._spell = spell
        self._propose = propose
        self._scores: dict[Tokens, float] = {}

    @property
    def has_own_tokens(self) -> bool:
        """Whether the decoder's tokens differ from CTC's."""
        return self._spell is not None

    @cached_property
    def proposals(self) -> Sequence[Tokens]:
        """The texts that the decoder generates by itself, as tokens of CTC."""
        return () if self._propose is None else self._propose()

    def score(self, sequences: Sequence[Tokens]) -> list[float]:
        """Return ln p(tokens, end | audio) of each sequence."""
        unscored = [tokens for tokens in dict.fromkeys(sequences) if tokens not in self._scores]
        if unscored:
            spellings = [self._spell(tokens) if self._spell else tokens for tokens in unscored]
            padded = np.full(
                (len(spellings), max(map(len, spellings)) + 1), self._end
            )  # (N, L + 1)
            for row, tokens in zip(padded, spellings, strict=True):
                row[: len(tokens)] = tokens
            scores: list[float] = self._score_texts(padded).tolist()
            self._scores |= zip(unscored, scores, strict=True)
        return [self._scores[tokens] for tokens in sequences]
