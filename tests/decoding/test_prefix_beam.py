"""The prefix beam finds what an enumeration of all alignments finds."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.decoding.prefix_beam import LogProbs, NoScorer, PrefixBeam, Scorer
from sbkit.decoding.sum_scorer import SumScorer
from sbkit.decoding.word_scorer import TokenScorer, WordScorer
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import END, NgramModel
from sbkit.lm.ngram import UNKNOWN as UNKNOWN_WORD

PIECES = ["<blank>", "a", "b", "▁"]
SENTENCES = ["a b", "ab a", "ab ab b", "b a a", "ba ab a", "a ab"]
WORDS = train([each.split() for each in SENTENCES], order=3).model
TOKENS = train([list(each.replace(" ", "▁")) for each in SENTENCES], order=3).model
WEIGHT, BONUS, UNKNOWN = 0.7, 0.4, -1.5


def words_score(tokens: tuple[int, ...]) -> float:
    """Score a text by the model of words, as a whole."""
    words = "".join(PIECES[token] for token in tokens).replace("▁", " ").split()
    ids = [WORDS.id_of(word) for word in words]
    total, state = 0.0, WORDS.start
    for word in (*ids, END):
        log_prob, state = WORDS.score(state, word)
        total += WEIGHT * log_prob
    return total + BONUS * len(words) + UNKNOWN * ids.count(UNKNOWN_WORD)


def tokens_score(tokens: tuple[int, ...]) -> float:
    sentence = [PIECES[token] for token in tokens]
    return WEIGHT * TOKENS.sentence_log_prob(sentence) + BONUS * len(tokens)


def scorer_of(name: str) -> Scorer:
    by_words = WordScorer(model=WORDS, pieces=PIECES, weight=WEIGHT, bonus=BONUS, unknown=UNKNOWN)
    by_tokens = TokenScorer(model=TOKENS, pieces=PIECES, weight=WEIGHT, bonus=BONUS)
    both = SumScorer(by_words, by_tokens)
    return {"none": NoScorer(), "words": by_words, "tokens": by_tokens, "both": both}[name]


SCORES = {
    "none": lambda tokens: 0.0,
    "words": words_score,
    "tokens": tokens_score,
    "both": lambda tokens: words_score(tokens) + tokens_score(tokens),
}


def enumerate_all(log_probs: LogProbs, name: str) -> dict[tuple[int, ...], float]:
    """Score every text by all of its alignments."""
    alignments: dict[tuple[int, ...], list[float]] = defaultdict(list)
    frames, size = log_probs.shape
    for path in itertools.product(range(size), repeat=frames):
        merged = tuple(token for token, _ in itertools.groupby(path) if token)
        alignments[merged].append(sum(log_probs[frame, token] for frame, token in enumerate(path)))
    return {
        tokens: float(np.logaddexp.reduce(values)) + SCORES[name](tokens)
        for tokens, values in alignments.items()
    }


def matrix(seed: int) -> LogProbs:
    """Draw the log-probabilities of 1 to 6 frames over 4 tokens."""
    random = np.random.default_rng(seed)
    logits = 2 * random.standard_normal((random.integers(1, 7), len(PIECES)))
    scores: LogProbs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return scores


def beam_of(name: str, size: int | None) -> PrefixBeam:
    return PrefixBeam(
        scorer=scorer_of(name), blank=0, beam_size=size, max_candidates=None, min_log_prob=None
    )


@pytest.mark.parametrize("name", SCORES)
def test_without_pruning_it_is_exact(name: str) -> None:
    for seed in range(200):
        log_probs = matrix(seed)
        every = enumerate_all(log_probs, name)
        found = beam_of(name, None).decode(log_probs, nbest=len(every))
        assert len(found) == len(every)
        assert [each.score for each in found] == sorted((e.score for e in found), reverse=True)
        for each in found:
            assert each.score == pytest.approx(every[each.tokens], abs=1e-9)


@pytest.mark.parametrize("name", SCORES)
def test_a_small_beam_mostly_finds_the_best(name: str) -> None:
    found = 0
    for seed in range(50):
        log_probs = matrix(1000 + seed)
        every = enumerate_all(log_probs, name)
        best = beam_of(name, 16).decode(log_probs)[0]
        found += every[best.tokens] == pytest.approx(max(every.values()), abs=1e-9)
    assert found >= 45


def test_impossible_tokens_are_not_written() -> None:
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.array([[0.5, 0.5, 0, 0], [0.1, 0.9, 0, 0], [1.0, 0, 0, 0]]))
    found = beam_of("none", None).decode(log_probs, nbest=9)
    assert {each.tokens for each in found} == {(), (1,)}
    assert math.exp(found[0].score) == pytest.approx(0.95)


def test_no_frame_is_an_empty_text() -> None:
    (best,) = beam_of("words", 16).decode(np.empty((0, 4)))
    assert best.tokens == ()
    assert best.score == pytest.approx(words_score(()))


def test_pruning_of_tokens_keeps_the_likely_ones() -> None:
    log_probs = matrix(3)
    beam = replace(beam_of("none", None), max_candidates=1)
    written = {token for each in beam.decode(log_probs, nbest=99) for token in each.tokens}
    likely = {int(row[1:].argmax()) + 1 for row in log_probs}
    assert written <= likely


@pytest.mark.parametrize(
    ("log_probs", "what"),
    [
        (np.full((2, 4), np.nan), "its output is not a number".replace("its", "model's")),
        (np.full((2, 4), -np.inf), "must have a token that is possible"),
    ],
)
def test_a_matrix_without_meaning_is_refused(log_probs: LogProbs, what: str) -> None:
    with pytest.raises(SbkitError, match=what):
        beam_of("none", 16).decode(log_probs)


def test_a_beam_of_nothing_is_refused() -> None:
    with pytest.raises(SbkitError, match="`beam_size` must be at least 1, but is 0"):
        beam_of("none", 0)


def test_pieces_of_words_and_letters_spell_alike() -> None:
    """What a token is made of does not matter: "▁ab", or "▁", "a", "b"."""
    pieces = ["<blank>", "▁ab", "▁a", "a", "b", "▁"]
    scorer = WordScorer(model=WORDS, pieces=pieces, weight=WEIGHT, bonus=BONUS, unknown=UNKNOWN)

    def total(tokens: list[int]) -> float:
        score, state = 0.0, scorer.start()
        for token in tokens:
            added, state = scorer.step(state, token)
            score += added
        return score + scorer.end(state)

    spelled = [[1, 1], [5, 3, 4, 5, 2, 4], [2, 4, 5, 3, 4], [3, 4, 1, 5]]
    scores = [total(tokens) for tokens in spelled]
    assert scores == pytest.approx([scores[0]] * 4)


def test_a_model_of_one_word_order_works_too() -> None:
    model: NgramModel = train([["a"], ["b", "a"]], order=1).model
    scorer = WordScorer(model=model, pieces=PIECES, weight=1.0, bonus=0.0, unknown=0.0)
    beam = replace(beam_of("none", None), scorer=scorer)
    assert len(beam.decode(matrix(1), nbest=5)) == 5
