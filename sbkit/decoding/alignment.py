"""Forced alignment of a text by CTC, and the times of its words.

Viterbi over the text with blanks between its tokens. Any decoder's text can be aligned, so that
times do not depend on the search. CTC emits a token in one or two of the frames in which it is
spoken, so a word begins before its first token and ends after its last: into a pause by offsets
that are fitted to data with known times; without a pause, two words meet in the middle.

Legend: U frames, V vocabulary, L tokens, S = 2 L + 1 states: blank, token, blank, ..., blank; N
words, step: samples from a frame to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sbkit.base.errors import SbkitError
from sbkit.decoding.frames import LogProbs
from sbkit.text.tokenizer import SPACE

LARGEST_OFFSET = 25.0  # frames of 40 ms: a second


@dataclass(frozen=True)
class TimedToken:
    """A token and its frames: the first, and the one after the last."""

    token: int
    first: int
    end: int


@dataclass(frozen=True)
class TimedWord:
    """A word and the tokens that spell it, one or more."""

    text: str
    tokens: tuple[TimedToken, ...]

    @property
    def first(self) -> int:
        """Return the first frame."""
        return self.tokens[0].first

    @property
    def end(self) -> int:
        """Return the frame after the last."""
        return self.tokens[-1].end


def align(log_probs: LogProbs, tokens: Sequence[int], blank: int) -> list[tuple[int, int]]:
    """Return the first frame of each token and the one after its last: (U, V) -> L pairs.

    Raises SbkitError where the text has more tokens than the frames can hold.
    """
    if not tokens:
        return []
    states = np.full(2 * len(tokens) + 1, blank)
    states[1::2] = tokens
    skip = np.zeros(len(states), np.bool_)  # tokens that may follow the one before without a blank
    skip[2:] = (states[2:] != blank) & (states[2:] != states[:-2])
    path = _best_path(log_probs[:, states].astype(np.float64), skip)
    frames = [np.flatnonzero(path == 2 * place + 1) for place in range(len(tokens))]
    return [(int(each[0]), int(each[-1]) + 1) for each in frames]


def frames_needed(tokens: Sequence[int]) -> int:
    """Count the frames that CTC needs to emit tokens: one each, and a blank before each repeat."""
    return len(tokens) + sum(token == after for token, after in pairwise(tokens))


def _best_path(
    scores: npt.NDArray[np.float64], skip: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the best state of each frame: (U, S) -> (U,)."""
    frames, size = scores.shape
    best = np.full(size, -np.inf)
    best[0] = 0.0
    steps = np.zeros((frames, size), np.int8)  # how many states back each came from
    before = np.full((3, size), -np.inf)
    for frame in range(frames):
        before[0] = best
        before[1, 1:] = best[:-1]
        before[2, 2:] = np.where(skip[2:], best[:-2], -np.inf)
        steps[frame] = before.argmax(0)
        best = before.max(0) + scores[frame]
    state = size - 1 if best[-1] >= best[-2] else size - 2
    if frames == 0 or best[state] == -np.inf:
        raise SbkitError(
            f"A text must have no more tokens than frames to be aligned, but has {size // 2} for "
            f"{frames} frames. Align it with its own audio."
        )
    path = np.empty(frames, np.int64)
    for frame in range(frames - 1, -1, -1):
        path[frame] = state
        state -= int(steps[frame, state])
    return path


def time_words(
    log_probs: LogProbs, tokens: Sequence[int], *, pieces: Sequence[str], blank: int
) -> list[TimedWord]:
    """Return the words of a text with their frames; ``pieces`` are the tokens as written."""
    words: list[TimedWord] = []
    text, spelled = "", list[TimedToken]()
    for token, frames in zip(tokens, align(log_probs, tokens, blank), strict=True):
        timed = TimedToken(token, *frames)
        for letter in pieces[token]:
            if letter == SPACE:
                if text:
                    words.append(TimedWord(text, tuple(spelled)))
                text, spelled = "", []
                continue
            text += letter
            if timed not in spelled[-1:]:
                spelled.append(timed)
    return [*words, TimedWord(text, tuple(spelled))] if text else words


@dataclass(frozen=True)
class WordOffsets:
    """How far a word reaches beyond its tokens into a pause, in frames.

    start: added to its first frame, mostly below zero; end: added to the frame after its last.
    """

    start: float = -1.2
    end: float = 3.05

    @classmethod
    def of(cls, value: Any) -> "WordOffsets":
        """Read offsets from plain data; raise ValueError or TypeError for what is none."""
        offsets = cls(**value)
        if not all(abs(each) <= LARGEST_OFFSET for each in (offsets.start, offsets.end)):
            raise ValueError(f"an offset is beyond {LARGEST_OFFSET:g} frames")
        return offsets

    def place(
        self, words: Sequence[TimedWord], *, samples: int, step: int
    ) -> list[tuple[int, int]]:
        """Return the first sample of each word, and the one after its last.

        No word overlaps another, or leaves the clip, which has ``samples``.
        """
        first = np.array([word.first for word in words], np.float64)
        end = np.array([word.end for word in words], np.float64)
        bounds = np.stack([first + self.start, end + self.end], axis=1)  # (N, 2)
        near = bounds[1:, 0] < bounds[:-1, 1]
        bounds[1:, 0][near] = bounds[:-1, 1][near] = ((end[:-1] + first[1:]) / 2)[near]
        bounds = np.rint(step * bounds).clip(0, samples)
        rising = np.maximum.accumulate(bounds.ravel()).reshape(-1, 2)
        return [(int(begin), int(after)) for begin, after in rising]
