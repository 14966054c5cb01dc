"""An unbounded prefix beam search equals the sum over all paths, with any scorers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.decoding.hotwords import HotwordScorer
from sbkit.decoding.prefix_beam import (
    PrefixBeamSearch,
    PrefixScorer,
    TokenScorer,
    WordScorer,
    log_add,
    make_lexicon,
)
from tests.decoding.by_definition import (
    BEAM_OF_16,
    CHARACTERS,
    PIECES,
    SETTINGS,
    LettersTokenizer,
    best_of,
    count_rewards,
    enumerate_paths,
    random_matrices,
    random_model,
    sentence_log_prob,
    steps_of,
    words_of,
)

Tokens = tuple[int, ...]
Definition = Callable[[Sequence[int]], float]
Beam = dict[Tokens, tuple[float, float]]  # ln p of what ends in a blank, and in its token
Scored = tuple[list[PrefixScorer], Definition]
WORDS, PHRASES = ("a", "ab", "aab", "bab"), ("ab", "b a", "a b a", "bb", "a ab b")


def nothing(pieces: tuple[str, ...]) -> Scored:
    return [], lambda tokens: 0.0


def token_model(pieces: tuple[str, ...]) -> Scored:
    model = random_model(pieces[1:], seed=1)
    scorer = TokenScorer(lm=model, pieces=pieces, lm_weight=0.7, token_bonus=0.4)

    def definition(tokens: Sequence[int]) -> float:
        spoken = [pieces[token] for token in tokens]
        return 0.7 * sentence_log_prob(model, spoken) + 0.4 * len(spoken)

    return [scorer], definition


def word_model(pieces: tuple[str, ...]) -> Scored:
    model = random_model(WORDS, seed=2)
    scorer = WordScorer(
        lm=model,
        lexicon=make_lexicon(model, LettersTokenizer(pieces)),
        tokenizer=LettersTokenizer(pieces),
        lm_weight=0.8,
        word_bonus=0.5,
        unknown_word_score=-1.5,
        added_words=["bb"],
    )

    def definition(tokens: Sequence[int]) -> float:
        words = words_of(tokens, pieces)
        prices = [0.5 + (word not in (*WORDS, "bb")) * -1.5 for word in words]
        return 0.8 * sentence_log_prob(model, words) + sum(prices)

    return [scorer], definition


def hotwords(pieces: tuple[str, ...]) -> Scored:
    tokenizer = LettersTokenizer(pieces)
    phrases = [phrase for phrase in PHRASES if tokenizer.spelling(phrase)]
    rewards = {phrase: 2.5 * min(1.0, len(phrase) / 4) for phrase in phrases}
    scorer = HotwordScorer(rewards=rewards, tokenizer=tokenizer)
    return [scorer], lambda tokens: 2.5 * count_rewards(words_of(tokens, pieces), phrases)


def all_at_once(pieces: tuple[str, ...]) -> Scored:
    parts = [token_model(pieces), word_model(pieces), hotwords(pieces)]
    scorers = [scorer for (scorer,), _ in parts]
    return scorers, lambda tokens: sum(definition(tokens) for _, definition in parts)


@pytest.mark.parametrize("pieces", [CHARACTERS, PIECES], ids=["characters", "pieces"])
@pytest.mark.parametrize("model", [nothing, token_model, word_model, hotwords, all_at_once])
def test_unbounded_beam_equals_enumeration_and_beam_of_16_nearly(
    model: Callable[[tuple[str, ...]], Scored], pieces: tuple[str, ...]
) -> None:
    scorers, definition = model(pieces)
    exact = PrefixBeamSearch(settings=SETTINGS, scorers=scorers)
    bounded = PrefixBeamSearch(settings=BEAM_OF_16, scorers=scorers)
    matrices = random_matrices(200 if pieces == CHARACTERS else 50)
    num_best = 0
    for log_probs in matrices:
        ctc_scores = enumerate_paths(log_probs)
        added = {tokens: definition(tokens) for tokens in ctc_scores}
        scores = {tokens: ctc_scores[tokens] + added[tokens] for tokens in ctc_scores}
        beam = exact.decode(log_probs)
        assert {hypothesis.tokens for hypothesis in beam} == scores.keys()
        assert len(beam) == len(scores)
        for hypothesis in beam:
            tokens = hypothesis.tokens
            assert hypothesis.score == pytest.approx(scores[tokens], abs=1e-9)
            hypothesis = exact.score(log_probs, tokens)  # as if another decoder had proposed it
            assert (hypothesis.tokens, hypothesis.score) == (
                tokens,
                pytest.approx(hypothesis.score, abs=1e-9),
            )
        ordered = [hypothesis.score for hypothesis in beam]
        assert ordered == sorted(ordered, reverse=True)
        num_best += bounded.decode(log_probs)[0].tokens == best_of(scores)
    assert num_best >= 0.9 * len(matrices)


def plain_search(
    log_probs: np.ndarray, scorers: Sequence[PrefixScorer], size: int
) -> dict[Tokens, float]:
    """Search without pruning tokens and without caches."""
    beam: Beam = {(): (0.0, -inf)}

    def score(tokens: Tokens) -> float:
        return log_add(*after[tokens]) + sum(
            sum(steps_of(scorer, tokens, ends=False)) for scorer in scorers
        )

    for frame in log_probs.tolist():
        after: Beam = {}
        for tokens, (in_blank, in_token) in beam.items():
            total, last = log_add(in_blank, in_token), tokens[-1] if tokens else 0
            add(after, tokens, total + frame[0], in_token + frame[last] if tokens else -inf)
            for token in range(1, len(frame)):
                extended = in_blank if token == last else total
                add(after, (*tokens, token), -inf, extended + frame[token])
        best = sorted(after, key=score, reverse=True)[:size]
        beam = {tokens: after[tokens] for tokens in best if score(tokens) > -inf}
    return {
        tokens: log_add(*parts) + sum(sum(steps_of(lm, tokens)) for lm in scorers)
        for tokens, parts in beam.items()
    }


def add(beam: Beam, tokens: Tokens, in_blank: float, in_token: float) -> None:
    blank_total, token_total = beam.get(tokens, (-inf, -inf))
    beam[tokens] = (log_add(blank_total, in_blank), log_add(token_total, in_token))


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_bounded_beam_equals_plain_beam(size: int) -> None:
    """Prefixes leave the beam and return; earlier clips change nothing."""
    scorers, _ = all_at_once(CHARACTERS)
    search = PrefixBeamSearch(settings=replace(SETTINGS, beam_size=size), scorers=scorers)
    for log_probs in random_matrices(100, seed=4):
        beam = search.decode(log_probs)
        expected = plain_search(log_probs, scorers, size)
        ordered = dict(sorted(expected.items(), key=itemgetter(1), reverse=True))
        assert [hypothesis.tokens for hypothesis in beam] == [*ordered]
        assert [hypothesis.score for hypothesis in beam] == pytest.approx([*ordered.values()])


def test_certain_blank_separates_repeated_tokens_as_in_an_exact_search() -> None:
    spoken, pause = [0.04, 0.01, 0.94, 0.01], [0.985, 0.005, 0.005, 0.005]
    log_probs = np.log([spoken, pause, pause, spoken])
    certain = replace(SETTINGS, blank_threshold=float(np.log(0.98)))
    best, exact = (PrefixBeamSearch(settings=s).decode(log_probs)[0] for s in (certain, SETTINGS))
    assert best.tokens == exact.tokens == (2, 2)
    assert best.score == pytest.approx(exact.score, abs=0.02)


def test_rule_of_silence_changes_nothing_near_speech() -> None:
    """Six frames with a token are all near it; without one, nothing is written."""
    exact = PrefixBeamSearch(settings=SETTINGS)
    careful = PrefixBeamSearch(settings=replace(SETTINGS, silent_ids=(0,)))
    for log_probs in random_matrices(100, seed=7):
        beam = careful.decode(log_probs)
        if log_probs.argmax(1).any():
            assert beam == exact.decode(log_probs)
        else:
            assert [hypothesis.tokens for hypothesis in beam] == [()]
            assert beam[0].score == pytest.approx(log_probs[:, 0].sum(), abs=1e-9)


def test_decode_refuses_invalid_log_probabilities() -> None:
    for log_probs, sentence in (
        (np.zeros((3, 5)), "has 4 tokens, but the model's log-probabilities have 5 col"),
        (np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]]), "in frame 1 it is nan"),
        (np.full((1, 4), -np.inf), "in frame 0 it is -inf"),
    ):
        with pytest.raises(SbkitError, match=sentence):
            PrefixBeamSearch(settings=BEAM_OF_16).decode(log_probs)
