"""Forced alignment of a text by CTC, and the times of its words.

Viterbi over the text with blanks between its tokens. The text of any decoder can be aligned, so
times do not depend on the decoder. CTC emits a token in one or two of the frames in which it is
spoken, so a word begins before its first token and ends after its last one. In a pause, offsets
that were fitted to data with known times extend it; without a pause, two words meet in the middle.

Legend: U frames, V vocabulary, L tokens, S = 2 L + 1 states: blank, token, blank, ..., blank;
N words; step: samples from one frame to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbkit.base.arrays import Bools, Counts, Float64s, LogProbs
from sbkit.base.errors import DataError
from sbkit.text.tokenizer import SPACE

MAX_OFFSET_FRAMES = 25.0  # of 40 ms: a second


@dataclass(frozen=True)
class TimedToken:
    """A token with its first frame and the frame after its last."""

    token: int
    first: int
    end: int


@dataclass(frozen=True)
class TimedWord:
    """A word and its tokens, with its first frame and the frame after its last."""

    text: str
    tokens: tuple[TimedToken, ...]

    @property
    def first(self) -> int:
        return self.tokens[0].first

    @property
    def end(self) -> int:
        return self.tokens[-1].end


def align(log_probs: LogProbs, tokens: Sequence[int], blank: int) -> list[tuple[int, int]]:
    """Return the first frame of each token and the frame after its last: (U, V) -> L pairs.

    Raises DataError if the text has more tokens than the frames can hold.
    """
    if not tokens:
        return []
    states = np.full(2 * len(tokens) + 1, blank)
    states[1::2] = tokens
    skip = np.zeros(len(states), np.bool_)  # tokens that may follow the last without a blank
    skip[2:] = (states[2:] != blank) & (states[2:] != states[:-2])
    path = _best_path(log_probs[:, states].astype(np.float64), skip)
    frames = [np.flatnonzero(path == 2 * index + 1) for index in range(len(tokens))]
    return [(int(span[0]), int(span[-1]) + 1) for span in frames]


def frames_needed(tokens: Counts, lengths: Counts) -> Counts:
    """Count the frames that CTC needs for each of N texts: one per token, and one per repeat.

    tokens: those of all texts, one text after the other; lengths: of each text, (N,) -> (N,).
    """
    texts = np.repeat(np.arange(len(lengths)), lengths)
    is_repeat = (tokens[1:] == tokens[:-1]) & (texts[1:] == texts[:-1])  # needs a blank before it
    return lengths + np.bincount(texts[1:][is_repeat], minlength=len(lengths))


def _best_path(scores: Float64s, skip: Bools) -> Counts:
    """Return the best state of each frame: (U, S) -> (U,)."""
    num_frames, num_states = scores.shape
    best = np.full(num_states, -np.inf)
    best[0] = 0.0
    steps = np.zeros((num_frames, num_states), np.int8)  # distance to the best previous state
    candidates = np.full((3, num_states), -np.inf)
    for frame in range(num_frames):
        candidates[0] = best
        candidates[1, 1:] = best[:-1]
        candidates[2, 2:] = np.where(skip[2:], best[:-2], -np.inf)
        steps[frame] = candidates.argmax(0)
        best = candidates.max(0) + scores[frame]
    state = num_states - 1 if best[-1] >= best[-2] else num_states - 2
    if num_frames == 0 or best[state] == -np.inf:
        raise DataError(
            f"A text of {num_states // 2} tokens cannot be aligned with {num_frames} frames, which "
            "are too few. Align it with its own audio."
        )
    path = np.empty(num_frames, np.int64)
    for frame in range(num_frames - 1, -1, -1):
        path[frame] = state
        state -= int(steps[frame, state])
    return path


def time_words(
    log_probs: LogProbs, tokens: Sequence[int], *, pieces: Sequence[str], blank: int
) -> list[TimedWord]:
    """Return the words of a text with their frames; ``pieces``: the written form by token id."""
    words: list[TimedWord] = []
    text, timed_tokens = "", list[TimedToken]()
    for token, frames in zip(tokens, align(log_probs, tokens, blank), strict=True):
        timed = TimedToken(token, *frames)
        for letter in pieces[token]:
            if letter == SPACE:
                if text:
                    words.append(TimedWord(text, tuple(timed_tokens)))
                text, timed_tokens = "", []
                continue
            text += letter
            if timed not in timed_tokens[-1:]:
                timed_tokens.append(timed)
    return [*words, TimedWord(text, tuple(timed_tokens))] if text else words


@dataclass(frozen=True)
class WordOffsets:
    """How far a word extends beyond its tokens into a pause, in frames.

    start: added to its first frame, mostly negative; end: added to the frame after its last.
    """

    start: float = -1.2
    end: float = 3.05

    @classmethod
    def of(cls, value: Any) -> "WordOffsets":
        """Read offsets from plain data; raise ValueError or TypeError if they are invalid."""
        offsets = cls(**value)
        if not all(abs(offset) <= MAX_OFFSET_FRAMES for offset in (offsets.start, offsets.end)):
            raise ValueError(f"an offset is beyond {MAX_OFFSET_FRAMES:g} frames")
        return offsets

    def place(
        self, words: Sequence[TimedWord], *, samples: int, step: int
    ) -> list[tuple[int, int]]:
        """Return the first sample of each word, and the sample after its last.

        Words do not overlap, and stay within the clip, which has ``samples``.
        """
        first = np.array([word.first for word in words], np.float64)
        end = np.array([word.end for word in words], np.float64)
        bounds = np.stack([first + self.start, end + self.end], axis=1)  # (N, 2)
        overlap = bounds[1:, 0] < bounds[:-1, 1]
        bounds[1:, 0][overlap] = bounds[:-1, 1][overlap] = ((end[:-1] + first[1:]) / 2)[overlap]
        bounds = np.rint(step * bounds).clip(0, samples)
        rising = np.maximum.accumulate(bounds.ravel()).reshape(-1, 2)
        return [(int(start), int(end)) for start, end in rising]
