"""A beam without bounds finds what adding up all paths finds, whatever scores it adds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.decoding.frames import BeamSettings, make_frames
from sbkit.decoding.hotwords import HotwordScorer
from sbkit.decoding.prefix_beam import PrefixBeamSearch, log_add
from sbkit.decoding.scorer import NOTHING, Scorer, SumOfScorers, TokenScorer
from sbkit.decoding.word_scorer import WordScorer, make_lexicon
from tests.decoding.by_definition import (
    BEAM_OF_16,
    CHARACTERS,
    PIECES,
    SETTINGS,
    best_of,
    count_rewards,
    enumerate_paths,
    random_matrices,
    random_model,
    sentence_log_prob,
    spelling,
    words_of,
)

Definition = Callable[[Sequence[int]], float]
WORDS, PHRASES = ("a", "ab", "aab", "bab"), ("ab", "b a", "a b a", "bb")


def nothing(pieces: tuple[str, ...]) -> tuple[Scorer, Definition]:
    return NOTHING, lambda tokens: 0.0


def token_model(pieces: tuple[str, ...]) -> tuple[Scorer, Definition]:
    model = random_model(pieces[1:], seed=1)
    scorer = TokenScorer(lm=model, pieces=pieces, lm_weight=0.7, token_bonus=0.4, special=(0,))

    def definition(tokens: Sequence[int]) -> float:
        spoken = [pieces[token] for token in tokens]
        return 0.7 * sentence_log_prob(model, spoken) + 0.4 * len(spoken)

    return scorer, definition


def word_model(pieces: tuple[str, ...]) -> tuple[Scorer, Definition]:
    model = random_model(WORDS, seed=2)
    scorer = WordScorer(
        lm=model,
        lexicon=make_lexicon(model, spelling(pieces)),
        spelling=spelling(pieces),
        lm_weight=0.8,
        word_bonus=0.5,
        unknown_word_score=-1.5,
        added_words=["bb"],
    )

    def definition(tokens: Sequence[int]) -> float:
        words = words_of(tokens, pieces)
        prices = [0.5 + (word not in (*WORDS, "bb")) * -1.5 for word in words]
        return 0.8 * sentence_log_prob(model, words) + sum(prices)

    return scorer, definition


def hotwords(pieces: tuple[str, ...]) -> tuple[Scorer, Definition]:
    phrases = [each for each in PHRASES if spelling(pieces).letters(each)]
    rewards = {phrase: 2.5 * min(1.0, len(phrase) / 4) for phrase in phrases}
    scorer = HotwordScorer(rewards=rewards, spelling=spelling(pieces))
    return scorer, lambda tokens: 2.5 * count_rewards(words_of(tokens, pieces), phrases)


def all_at_once(pieces: tuple[str, ...]) -> tuple[Scorer, Definition]:
    parts = [token_model(pieces), word_model(pieces), hotwords(pieces)]
    scorer = SumOfScorers(scorers=[scorer for scorer, _ in parts])
    return scorer, lambda tokens: sum(definition(tokens) for _, definition in parts)


MODELS = [nothing, token_model, word_model, hotwords, all_at_once]


@pytest.mark.parametrize("pieces", [CHARACTERS, PIECES], ids=["characters", "pieces"])
@pytest.mark.parametrize("model", MODELS)
def test_without_bounds_it_is_enumeration_and_with_16_nearly(
    model: Callable[[tuple[str, ...]], tuple[Scorer, Definition]], pieces: tuple[str, ...]
) -> None:
    scorer, definition = model(pieces)
    exact = PrefixBeamSearch(settings=SETTINGS, scorer=scorer)
    bounded = PrefixBeamSearch(settings=BEAM_OF_16, scorer=scorer)
    matrices = random_matrices(200 if pieces == CHARACTERS else 50)
    found = 0
    for log_probs in matrices:
        ctc_scores = enumerate_paths(log_probs)
        added = {tokens: definition(tokens) for tokens in ctc_scores}
        scores = {tokens: ctc_scores[tokens] + added[tokens] for tokens in ctc_scores}
        answer = exact.decode(log_probs)
        assert {each.tokens for each in answer} == scores.keys()
        assert len(answer) == len(scores)
        for each in answer:
            assert each.score == pytest.approx(scores[each.tokens], abs=1e-9)
            assert each.ctc_score == pytest.approx(ctc_scores[each.tokens], abs=1e-9)
            assert each.lm_score == pytest.approx(added[each.tokens], abs=1e-9)
        ordered = [each.score for each in answer]
        assert ordered == sorted(ordered, reverse=True)
        found += bounded.decode(log_probs)[0].tokens == best_of(scores)
    assert found >= 0.9 * len(matrices)


@pytest.mark.parametrize("size", [1, 2, 16])
def test_a_bounded_beam_is_sorted_distinct_and_never_better_than_all_paths(size: int) -> None:
    search = PrefixBeamSearch(settings=replace(SETTINGS, beam_size=size))
    for log_probs in random_matrices(50, seed=4):
        answer = search.decode(log_probs)
        scores = [each.score for each in answer]
        assert len(answer) <= size and scores == sorted(scores, reverse=True)
        assert len({each.tokens for each in answer}) == len(answer)
        totals = enumerate_paths(log_probs)
        assert all(each.ctc_score <= totals[each.tokens] + 1e-9 for each in answer)


def certain(*path: int) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.eye(4)[list(path)].reshape(-1, 4))


@pytest.mark.parametrize(
    ("path", "tokens"),
    [((), ()), ((0, 0), ()), ((1, 1), (1,)), ((1, 0, 1), (1, 1)), ((2, 3, 3, 0, 3), (2, 3, 3))],
)
def test_one_possible_path_has_one_hypothesis(
    path: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    answers = [
        (each.tokens, each.score)
        for each in PrefixBeamSearch(settings=BEAM_OF_16).decode(certain(*path))
    ]
    assert answers == [(tokens, 0.0)]


def test_a_prefix_that_left_the_beam_and_returns_is_still_the_same_prefix() -> None:
    """With a beam of 2, (2,) leaves when (2, 3) enters, and comes back from the empty prefix."""
    search = PrefixBeamSearch(settings=replace(SETTINGS, beam_size=2))
    for log_probs in random_matrices(300, seed=9):
        tokens = [each.tokens for each in search.decode(log_probs)]
        assert len(set(tokens)) == len(tokens)


def test_tokens_below_the_threshold_are_not_appended_but_the_best_one_is() -> None:
    log_probs = np.log([[0.1, 0.2, 0.4, 0.3], [0.97, 0.01, 0.01, 0.01]])
    some = make_frames(log_probs, replace(SETTINGS, token_threshold=float(np.log(0.25))))
    assert [[token for token, _ in frame.candidates] for frame in some] == [[2, 3], [1, 2, 3]]
    without = make_frames(log_probs, replace(SETTINGS, token_threshold=0.0, excluded=(2,)))
    assert [[token for token, _ in frame.candidates] for frame in without] == [[3], [1, 3]]


def test_excluded_tokens_are_in_no_hypothesis() -> None:
    search = PrefixBeamSearch(settings=replace(SETTINGS, excluded=(2,)))
    answers = [search.decode(log_probs) for log_probs in random_matrices(30)]
    assert not any(2 in each.tokens for answer in answers for each in answer)


def test_what_was_decoded_before_changes_nothing() -> None:
    scorer, _ = all_at_once(CHARACTERS)
    search = PrefixBeamSearch(settings=BEAM_OF_16, scorer=scorer)
    matrices = random_matrices(30, seed=3)
    together = [search.decode(each) for each in matrices]
    alone = [PrefixBeamSearch(settings=BEAM_OF_16, scorer=scorer).decode(each) for each in matrices]
    assert together == alone


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beam_size": 0}, "`beam_size` must be at least 1, but is 0. Try --beam_size=16."),
        ({"blank": 4}, "The blank and excluded tokens must be ids from 0 to 3, but one is 4."),
        ({"excluded": (-1,)}, "The blank and excluded tokens must be ids from 0 to 3, but one is"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(SbkitError, match="^" + sentence):
        BeamSettings(vocab_size=4, **settings)


@pytest.mark.parametrize(
    ("log_probs", "sentence"),
    [
        (np.zeros((3, 5)), r"as many columns as the tokenizer has tokens \(4\), but have 5"),
        (np.zeros((1, 3, 4)), r"must have the two axes .* but have the shape \(1, 3, 4\)"),
        (np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]]), "that of frame 1 is nan"),
        (np.array([[0, 0, np.inf, 0]]), "that of frame 0 is inf"),
        (np.full((1, 4), -np.inf), "that of frame 0 is -inf"),
    ],
)
def test_what_is_no_log_probability_is_refused(log_probs: np.ndarray, sentence: str) -> None:
    with pytest.raises(SbkitError, match=sentence):
        PrefixBeamSearch(settings=BEAM_OF_16).decode(log_probs)


def test_the_sum_of_two_logarithms_knows_nothing_from_zero() -> None:
    assert log_add(-inf, -inf) == -inf
    assert log_add(-inf, -3.0) == log_add(-3.0, -inf) == -3.0
    assert log_add(-800.0, -801.0) == pytest.approx(-800 + np.log1p(np.exp(-1)), abs=1e-12)
