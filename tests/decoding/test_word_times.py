"""Words have the frames of the best alignment, extend into pauses, and have confidences."""

from collections.abc import Sequence
from math import inf

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.base.units import frames_needed
from sbkit.decoding.word_times import (
    Confidence,
    TimedToken,
    TimedWord,
    WordOffsets,
    align,
    time_words,
    word_features,
)
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import UNKNOWN
from sbkit.text.tokenizer import Tokenizer
from tests.decoding.by_definition import best_alignments, random_matrices
from tests.decoding.spoken import char_tokenizer, make_aligner, spoken

STEP = 10  # samples of a frame


# -- times


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2, 1], [3, 3], [2, 3, 1, 2]])
def test_align_finds_the_best_of_all_paths(tokens: list[int]) -> None:
    num_aligned = 0
    for log_probs in random_matrices(60):
        best = best_alignments(log_probs).get(tuple(tokens), -inf)
        if best == -inf:
            continue
        num_aligned += 1
        assert frames_needed(np.array(tokens), np.array([len(tokens)]))[0] <= len(log_probs)
        path = np.zeros(len(log_probs), np.int64)
        for token, (first, end) in zip(tokens, align(log_probs, tokens, blank=0), strict=True):
            path[first:end] = token
        assert log_probs[np.arange(len(path)), path].sum() == pytest.approx(best, abs=1e-9)
    assert num_aligned > 10


def test_time_words_takes_the_frames_of_the_tokens() -> None:
    """Frames of "a b", silence, space, "ab": words from their first token to their last."""
    path = [0, 1, 2, 0, 3, 0, 0, 1, 1, 0, 2, 0]
    log_probs = np.log(np.full((len(path), 4), 0.01) + 0.96 * np.eye(4)[path])
    pieces = ["<blank>", "a", "b", "▁"]
    words = time_words(log_probs, [1, 2, 3, 1, 2], pieces=pieces, blank=0)
    assert [(word.text, word.first, word.end) for word in words] == [("ab", 1, 3), ("ab", 7, 11)]
    assert [(token.first, token.end) for token in words[0].tokens] == [(1, 2), (2, 3)]
    assert time_words(log_probs, [], pieces=pieces, blank=0) == []
    words = time_words(log_probs, [1, 2, 3, 1], pieces=["<blank>", "▁ab", "c", "▁"], blank=0)
    assert [word.text for word in words] == ["abc", "ab"]
    assert len(words[0].tokens) == 2


def test_marks_in_a_pause_do_not_lengthen_words() -> None:
    """Frames of "(ab", silence, ".", silence, "." alone."""
    path = [1, 0, 2, 3, 0, 0, 4, 0, 5, 4]
    log_probs = np.log(np.full((len(path), 6), 0.01) + 0.94 * np.eye(6)[path])
    pieces = ["<blank>", "(", "a", "b", ".", "▁"]
    words = time_words(log_probs, [1, 2, 3, 4, 5, 4], pieces=pieces, blank=0)
    assert [(word.text, word.first, word.end) for word in words] == [("(ab.", 2, 4), (".", 9, 10)]
    assert [token.first for token in words[0].tokens] == [0, 2, 3, 6]


@pytest.mark.parametrize(("frames", "tokens"), [(0, [1]), (2, [1, 2, 3]), (2, [1, 1])])
def test_align_refuses_a_text_with_too_few_frames(frames: int, tokens: list[int]) -> None:
    message = f"{len(tokens)} tokens cannot be aligned with {frames} frames"
    with pytest.raises(SbkitError, match=message):
        align(np.zeros((frames, 4)) - 1.4, tokens, blank=0)


def to_samples(
    spans: Sequence[tuple[int, int]], *, start: float, end: float, samples: int = 1000
) -> list[tuple[int, int]]:
    words = [TimedWord("a", (TimedToken(*span, posterior=1.0),)) for span in spans]
    return WordOffsets(start, end).to_samples(words, samples=samples, frame_samples=STEP)


def test_offsets_extend_words_into_pauses_within_the_clip() -> None:
    assert to_samples([(20, 25), (60, 61)], start=-1.5, end=3.25) == [(185, 282), (585, 642)]
    # Without a pause, words meet in the middle of their tokens.
    assert to_samples([(20, 25), (28, 30)], start=-1.0, end=3.0) == [(190, 265), (265, 330)]
    # A frontend that pads makes frames that end after the audio.
    assert to_samples([(0, 98)], start=-1.0, end=3.0) == [(0, 1000)]
    assert to_samples([(0, 2)], start=0, end=0, samples=17) == [(0, 17)]
    assert to_samples([], start=-1.0, end=3.0) == []


# -- words with times and confidences


def test_features_are_of_the_weakest_token_the_length_and_the_history() -> None:
    def word(text: str, *posteriors: float) -> TimedWord:
        return TimedWord(text, tuple(TimedToken(0, 1, posterior) for posterior in posteriors))

    lm = train([["call", "the", "office"]] * 3 + [["call", "me"]], order=2).model
    call, the = word("call", 0.9, 0.5), word("the", 1.0)
    features = word_features([call, word("zebra", 0.9), the], lm)
    assert features[0] == (0.0, np.log(4), lm.advance(lm.start, lm.id_of("call"))[0])
    assert features[2].posterior == pytest.approx(np.log(1000), abs=0.01)
    unknown, after_unknown = lm.advance(lm.advance(lm.start, lm.id_of("call"))[1], UNKNOWN)
    assert features[1].lm == unknown - 3 * len("zebra")
    assert features[2].lm == lm.advance(after_unknown, lm.id_of("the"))[0]
    assert word_features([call], None)[0].lm == 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["call the office", "cold norm"])


def test_aligner_gives_an_unclear_word_a_lower_confidence(tokenizer: Tokenizer) -> None:
    log_probs = spoken(tokenizer, "call the office", {5: "c"})
    aligner = make_aligner(
        tokenizer,
        offsets=WordOffsets(0.0, 0.0),
        confidence=Confidence(0.0, 1.0, 0.0, 0.0),
    )
    tokens = tokenizer.encode("call the office")
    samples = 640 * len(log_probs)
    call, the, _ = aligner.align(log_probs, tokens, samples=samples, is_decoded=True)
    assert [call.text, the.text] == ["call", "the"]
    assert (call.start, call.end) == (0.0, pytest.approx(7 * 0.04))
    assert call.confidence is not None and the.confidence is not None
    assert the.confidence < 0.5 < 0.99 < call.confidence <= 0.999
    assert aligner.align(log_probs[:0], [], samples=0) == ()
