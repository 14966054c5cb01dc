"""Scores follow the definition of back-off, and states are the shortest sufficient histories."""

import random
from pathlib import Path

import numpy as np
import pytest

from sbkit.lm.arpa import read_arpa
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import BEGIN, END, NO_HISTORY, Grams, NgramModel
from tests.decoding.by_definition import sentence_log_prob, state_after

DATA = Path(__file__).parent / "data"
SENTENCES = (DATA / "sentences.txt").read_text().splitlines()
Table = dict[tuple[int, ...], tuple[float, float]]


def table(model: NgramModel) -> Table:
    """List the n-grams of a model by their ids: log-probability and back-off."""
    values: Table = {}
    contexts: list[tuple[int, ...]] = [()]
    for grams in model.grams:
        pairs = (divmod(key, len(model.words)) for key in grams.keys.tolist())
        ngrams = [(*contexts[row], word) for row, word in pairs]
        columns = zip(grams.log_probs.tolist(), grams.backoffs.tolist(), strict=True)
        values.update(zip(ngrams, columns, strict=True))
        contexts = ngrams
    return values


def back_off(values: Table, history: tuple[int, ...], word: int) -> float:
    """Score a word by the definition."""
    if (*history, word) in values:
        return values[*history, word][0]
    return values.get(history, (0, 0))[1] + back_off(values, history[1:], word)


@pytest.fixture(scope="module", params=["words", "words_pruned", "characters", "tiny"])
def model(request: pytest.FixtureRequest) -> NgramModel:
    return read_arpa(DATA / f"{request.param}.arpa")


def test_score_uses_the_whole_history(model: NgramModel) -> None:
    values, numbers = table(model), random.Random(0)
    for _ in range(40):
        state, history = model.start, (BEGIN,)
        for _ in range(12):
            followers = [
                ngram[-1] for ngram in values if ngram[:-1] == history[-1:] and ngram[-1] > END
            ]
            any_word = numbers.choice(range(3, len(model.words)))
            word = numbers.choice([*followers, 0, any_word])
            expected = back_off(values, history[1 - model.order :], word)
            log_prob, state = model.score(state, word)
            assert log_prob == pytest.approx(expected, abs=1e-9)
            history = (*history, word)


def test_states_are_the_shortest_sufficient_histories(model: NgramModel) -> None:
    values = table(model)
    contexts = {ngram[:-1] for ngram in values}
    numbers = {ngram: number for number, ngram in enumerate(values, start=1)} | {(): NO_HISTORY}
    for ngram in values:
        history = ngram[max(0, len(ngram) - model.order + 1) :]
        suffixes = (history[start:] for start in range(len(history) + 1))
        states = (s for s in suffixes if s in contexts or values.get(s, (0, 0))[1])
        assert state_after(model, *ngram) == numbers[next(states, ())]


def test_unknown_word_leads_to_the_empty_state() -> None:
    model = read_arpa(DATA / "words.arpa")
    assert "boat" in model and "zebra" not in model
    assert model.id_of("zebra") == 0
    assert model.score(model.start, 0)[1] == NO_HISTORY
    assert model.start == 1 + BEGIN
    assert train([["a"]], order=1).model.start == NO_HISTORY


def grams(keys: list[int], log_probs: list[float], backoffs: list[float]) -> Grams:
    values = (np.array(column, np.float32) for column in (log_probs, backoffs))
    return Grams(np.array(keys, np.int64), *values)


WORDS = ("<unk>", "<s>", "</s>", "a", "b")
UNIGRAMS = grams([0, 1, 2, 3, 4], [-4, -9, -1, -1, -2], [0, -0.5, 0, 0, -0.25])


def test_ngram_may_exist_without_its_suffix() -> None:
    """The model has `<s> a b` but not `a b`, so it backs off from there to `b`."""
    bigrams, trigrams = grams([1 * 5 + 3], [-0.1], [-0.125]), grams([0 * 5 + 4], [-0.5], [0])
    fourgrams = grams([0 * 5 + 3], [-0.75], [0])
    model = NgramModel(WORDS, (UNIGRAMS, bigrams, trigrams, fourgrams))
    state = model.start
    for word, expected in ((3, -0.1), (4, -0.5), (4, -2.25), (3, -1.25)):
        log_prob, state = model.score(state, word)
        assert log_prob == pytest.approx(expected)
    assert state == NO_HISTORY


def test_order_may_have_no_ngrams() -> None:
    sentences = [line.split() for line in SENTENCES]
    model = train(sentences, order=3).model
    longer = NgramModel(model.words, (*model.grams, grams([], [], [])))
    for sentence in sentences:
        assert sentence_log_prob(longer, sentence) == sentence_log_prob(model, sentence)
