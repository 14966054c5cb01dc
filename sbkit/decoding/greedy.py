"""Greedy decoding: the best token of each frame, repeats merged, blanks dropped.

Legend: U frames of 40 ms, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sbkit.decoding.frames import Hypothesis, LogProbs, check_log_probs


def merge_repeats(best: npt.NDArray[np.int64], blank: int, before: int | None = None) -> list[int]:
    """Merge repeats and drop blanks: the best token of each frame, (U,) -> token ids.

    before: the best token of the frame before these, None at the beginning.
    """
    previous = np.concatenate([[blank if before is None else before], best[:-1]])
    tokens: list[int] = best[(best != blank) & (best != previous)].tolist()
    return tokens


def best_tokens(log_probs: LogProbs, blank: int) -> list[int]:
    """Decode a whole clip greedily: (U, V) -> token ids."""
    return merge_repeats(log_probs.argmax(1), blank)


class GreedyState(NamedTuple):
    """What was decoded so far: last is the best token of the latest frame."""

    last: int
    tokens: tuple[int, ...] = ()
    score: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GreedySearch:
    """Decode greedily, a whole clip or frames that come in pieces."""

    vocab_size: int
    blank: int

    def nbest(self, log_probs: LogProbs, attention: object = None) -> Sequence[Hypothesis]:
        """Return the one hypothesis of a whole clip, (U, V)."""
        return self.finish(self.advance(self.start(), log_probs))

    def start(self) -> GreedyState:
        """Return the state before the first frame."""
        return GreedyState(self.blank)

    def advance(self, state: GreedyState, log_probs: LogProbs) -> GreedyState:
        """Return the state after more frames, natural log-probabilities (U, V).

        Raises SbkitError for another vocabulary and for frames without a finite largest value.
        """
        check_log_probs(log_probs, self.vocab_size)
        if not len(log_probs):
            return state
        best = log_probs.argmax(1)
        tokens = merge_repeats(best, self.blank, state.last)
        score = state.score + float(log_probs.max(1).sum())
        return GreedyState(int(best[-1]), (*state.tokens, *tokens), score)

    def copy(self, state: GreedyState) -> GreedyState:
        """Return a state that stays as it is when this one goes on."""
        return state

    def finish(self, state: GreedyState, attention: object = None) -> Sequence[Hypothesis]:
        """Return the one hypothesis; its score is that of the best alignment."""
        return [Hypothesis(tokens=state.tokens, score=state.score, ctc_score=state.score)]
