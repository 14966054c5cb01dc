"""Greedy decoding, and the hypotheses that every decoder returns.

Legend: U frames, V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sbkit.base.arrays import Bools, Counts, LogProbs
from sbkit.base.errors import DataError
from sbkit.decoding.attention import AttentionScorer
from sbkit.text.vocabulary import Vocabulary

REACH_FRAMES = 6  # frames: a quarter of a second at 40 ms, half a second at 80 ms
LOWEST = -1e4  # finite, so that any text can be aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A token sequence without blanks, with its score.

    score: ln p(tokens | audio) over the alignments that the search kept, and what scorers and an
        attention decoder add.
    """

    tokens: tuple[int, ...]
    score: float


def check_log_probs(log_probs: LogProbs, vocab_size: int) -> None:
    """Raise DataError if the vocabulary differs, or the largest value of a frame is not finite."""
    if log_probs.shape[1] != vocab_size:
        raise DataError(
            f"The tokenizer has {vocab_size} tokens, but the model's log-probabilities have "
            f"{log_probs.shape[1]} columns."
        )
    best = log_probs.max(1, initial=-np.inf)  # NaN where the frame contains one
    if not np.isfinite(best).all():
        frame = int(np.flatnonzero(~np.isfinite(best))[0])
        raise DataError(
            f"The largest log-probability of a frame must be finite, but in frame {frame} it is "
            f"{float(best[frame])}."
        )


def near_speech(log_probs: LogProbs, silent_ids: Collection[int]) -> Bools:
    """Return which frames (U, V) are near one whose best token has sound: (U,).

    silent_ids: the tokens without sound, blank and space.
    """
    has_sound = ~np.isin(log_probs.argmax(1), [*silent_ids])
    totals = np.pad(has_sound, (REACH_FRAMES + 1, REACH_FRAMES)).cumsum()
    is_near: Bools = totals[2 * REACH_FRAMES + 1 :] > totals[: -2 * REACH_FRAMES - 1]
    return is_near


def mask_silence(log_probs: LogProbs, silent_ids: Collection[int]) -> LogProbs:
    """Return log-probabilities (U, V) that allow only silent tokens in frames without speech."""
    masked = log_probs.copy()
    has_sound = ~np.isin(np.arange(log_probs.shape[1]), [*silent_ids])
    masked[np.ix_(~near_speech(log_probs, silent_ids), has_sound)] = LOWEST
    return masked


def merge_repeats(best: Counts, blank: int, previous: int | None = None) -> list[int]:
    """Merge repeats and drop blanks: the best token of each frame, (U,) -> token ids.

    previous: the best token of the frame before these, None at the start of the audio.
    """
    previous_tokens = np.concatenate([[blank if previous is None else previous], best[:-1]])
    tokens: list[int] = best[(best != blank) & (best != previous_tokens)].tolist()
    return tokens


def best_tokens(log_probs: LogProbs, blank: int) -> list[int]:
    """Decode a whole clip greedily: (U, V) -> token ids."""
    return merge_repeats(log_probs.argmax(1), blank)


class GreedyState(NamedTuple):
    """The result so far; ``last`` is the best token of the latest frame."""

    last: int
    tokens: tuple[int, ...] = ()
    score: float = 0.0


@dataclass(frozen=True)
class GreedyDecoder:
    """Decode a whole clip or a stream of frames greedily, as a `Decoder`.

    >>> decoder = GreedyDecoder(Vocabulary(size=6))
    >>> frames = np.log(np.eye(6)[[0, 4, 4, 0, 5]] + 0.01)
    >>> decoder.nbest(frames)[0].tokens
    (4, 5)
    """

    vocabulary: Vocabulary

    def nbest(
        self, log_probs: LogProbs, attention: AttentionScorer | None = None
    ) -> Sequence[Hypothesis]:
        """Return the text of a decoder with its own tokens, or of CTC's best frames."""
        if attention is not None and attention.proposals:
            (tokens, *_), (score, *_) = attention.proposals, attention.score(attention.proposals)
            return [Hypothesis(tokens=tokens, score=score)]
        return self.finish(self.advance(self.start(), log_probs))

    def start(self) -> GreedyState:
        return GreedyState(self.vocabulary.blank)

    def advance(self, state: GreedyState, log_probs: LogProbs) -> GreedyState:
        check_log_probs(log_probs, self.vocabulary.size)
        if not len(log_probs):
            return state
        best = log_probs.argmax(1)
        tokens = merge_repeats(best, self.vocabulary.blank, state.last)
        score = state.score + float(log_probs.max(1).sum())
        return GreedyState(int(best[-1]), (*state.tokens, *tokens), score)

    def finish(self, state: GreedyState, attention: object = None) -> Sequence[Hypothesis]:
        """Return the one hypothesis, with the score of the best alignment."""
        return [Hypothesis(tokens=state.tokens, score=state.score)]
