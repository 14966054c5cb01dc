"""Greedy decoding: the best token of each frame, repeats merged, blanks dropped.

Legend: U frames of 40 ms, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Counts, LogProbs
from sbkit.decoding.frames import Hypothesis, check_log_probs


def merge_repeats(best: Counts, blank: int, previous: int | None = None) -> list[int]:
    """Merge repeats and drop blanks: the best token of each frame, (U,) -> token ids.

    previous: the best token of the frame before these, None at the start of the audio.
    """
    before = np.concatenate([[blank if previous is None else previous], best[:-1]])
    tokens: list[int] = best[(best != blank) & (best != before)].tolist()
    return tokens


def best_tokens(log_probs: LogProbs, blank: int) -> list[int]:
    """Decode a whole clip greedily: (U, V) -> token ids."""
    return merge_repeats(log_probs.argmax(1), blank)


class GreedyState(NamedTuple):
    """The result so far; ``last`` is the best token of the latest frame."""

    last: int
    tokens: tuple[int, ...] = ()
    score: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GreedyDecoder:
    """Decode greedily, a whole clip or a stream of frames.

    >>> decoder = GreedyDecoder(vocab_size=3, blank=0)
    >>> frames = np.log(np.array([[0.1, 0.8, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))
    >>> decoder.nbest(frames)[0].tokens
    (1, 2)
    """

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

        Raises DataError for another vocabulary, or for frames without a finite largest value.
        """
        check_log_probs(log_probs, self.vocab_size)
        if not len(log_probs):
            return state
        best = log_probs.argmax(1)
        tokens = merge_repeats(best, self.blank, state.last)
        score = state.score + float(log_probs.max(1).sum())
        return GreedyState(int(best[-1]), (*state.tokens, *tokens), score)

    def copy(self, state: GreedyState) -> GreedyState:
        """Return an independent copy of a state."""
        return state

    def finish(self, state: GreedyState, attention: object = None) -> Sequence[Hypothesis]:
        """Return the one hypothesis, with the score of the best alignment."""
        return [Hypothesis(tokens=state.tokens, score=state.score, ctc_score=state.score)]
