"""The alignment is the best of all; words have its frames, and reach into pauses around them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sbkit.base.arrays import LogProbs
from sbkit.base.errors import SbkitError
from sbkit.decoding.words import (
    TimedToken,
    TimedWord,
    WordOffsets,
    align,
    frames_needed,
    time_words,
)

PIECES = ["<blank>", "a", "b", "▁"]
STEP = 10  # samples of a frame


def matrix(seed: int) -> LogProbs:
    """Draw the log-probabilities of 1 to 6 frames over 4 tokens."""
    random = np.random.default_rng(seed)
    logits = 2 * random.standard_normal((random.integers(1, 7), len(PIECES)))
    scores: LogProbs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return scores


def best_by_enumeration(log_probs: LogProbs, tokens: list[int]) -> float:
    """Score the best of all paths that write a text."""
    frames, size = log_probs.shape
    return max(
        sum(log_probs[frame, token] for frame, token in enumerate(path))
        for path in itertools.product(range(size), repeat=frames)
        if [token for token, _ in itertools.groupby(path) if token] == tokens
    )


def score_of(log_probs: LogProbs, tokens: list[int], spans: list[tuple[int, int]]) -> float:
    path = np.zeros(len(log_probs), np.int64)
    for token, (first, end) in zip(tokens, spans, strict=True):
        path[first:end] = token
    return float(log_probs[np.arange(len(path)), path].sum())


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2, 1], [3, 3], [2, 3, 1, 2]])
def test_align_finds_the_best_of_all_paths(tokens: list[int]) -> None:
    for seed in range(40):
        log_probs = matrix(seed)
        if len(log_probs) < frames_needed(np.array(tokens), np.array([len(tokens)]))[0]:
            continue
        spans = align(log_probs, tokens, blank=0)
        score = score_of(log_probs, tokens, spans)
        assert score == pytest.approx(best_by_enumeration(log_probs, tokens), abs=1e-9)


def test_time_words_takes_the_frames_of_the_tokens() -> None:
    """Frames of "a b", silence, space, "ab": words from their first token to their last."""
    path = [0, 1, 2, 0, 3, 0, 0, 1, 1, 0, 2, 0]
    log_probs = np.log(np.full((len(path), 4), 0.01) + 0.96 * np.eye(4)[path])
    words = time_words(log_probs, [1, 2, 3, 1, 2], pieces=PIECES, blank=0)
    assert [(word.text, word.first, word.end) for word in words] == [("ab", 1, 3), ("ab", 7, 11)]
    assert words[0].tokens == (TimedToken(1, 1, 2), TimedToken(2, 2, 3))
    assert time_words(log_probs, [], pieces=PIECES, blank=0) == []
    pieces = ["<blank>", "▁ab", "c", "▁"]
    words = time_words(log_probs, [1, 2, 3, 1], pieces=pieces, blank=0)
    assert [word.text for word in words] == ["abc", "ab"]
    assert [word.token for word in words[0].tokens] == [1, 2]


@pytest.mark.parametrize(("frames", "tokens"), [(0, [1]), (2, [1, 2, 3]), (2, [1, 1])])
def test_align_refuses_a_text_with_too_few_frames(frames: int, tokens: list[int]) -> None:
    message = f"{len(tokens)} tokens cannot be aligned with {frames} frames"
    with pytest.raises(SbkitError, match=message):
        align(np.zeros((frames, 4)) - 1.4, tokens, blank=0)


def timed(spans: Sequence[tuple[int, int]]) -> list[TimedWord]:
    return [TimedWord("a", (TimedToken(1, *span),)) for span in spans]


def place(spans: Sequence[tuple[int, int]], *, start: float, end: float, frames: int = 100) -> Any:
    return WordOffsets(start, end).place(timed(spans), samples=frames * STEP, step=STEP)


def test_word_between_pauses_grows_by_both_offsets() -> None:
    assert place([(20, 25), (60, 61)], start=-1.5, end=3.25) == [(185, 282), (585, 642)]


def test_words_without_a_pause_meet_in_the_middle_of_their_tokens() -> None:
    assert place([(20, 25), (28, 30)], start=-1.0, end=3.0) == [(190, 265), (265, 330)]


def test_no_word_leaves_its_clip() -> None:
    """A front-end that pads makes frames that end after the audio."""
    assert place([(0, 98)], start=-1.0, end=3.0) == [(0, 1000)]
    assert WordOffsets(0, 0).place(timed([(0, 2)]), samples=17, step=STEP) == [(0, 17)]
    assert place([], start=-1.0, end=3.0) == []


def test_words_follow_each_other_whatever_the_offsets() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        cuts = np.sort(random.choice(60, 2 * random.integers(1, 9), replace=False))
        start, end = random.uniform(-25, 25, 2).tolist()
        spans = place(cuts.reshape(-1, 2).tolist(), start=start, end=end, frames=60)
        bounds = np.ravel(spans)
        assert (np.diff(bounds) >= 0).all()
        assert bounds.min() >= 0
        assert bounds.max() <= 60 * STEP
