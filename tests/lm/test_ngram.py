"""A model answers as the definition of back-off does, with the shortest states that suffice."""

import random
from pathlib import Path

import numpy as np
import pytest

from sbkit.lm import ngram
from sbkit.lm.arpa import read_arpa
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import BEGIN, END, Grams, NgramModel
from tests.decoding.by_definition import sentence_log_prob

DATA = Path(__file__).parent / "data"
SENTENCES = (DATA / "sentences.txt").read_text().splitlines()
Table = dict[tuple[int, ...], tuple[float, float]]


def table(model: NgramModel) -> Table:
    """List the n-grams of a model by their ids: log-probability and back-off."""
    listed: Table = {}
    shorter: list[tuple[int, ...]] = [()]
    for grams in model.grams:
        longer = [
            (*shorter[key // len(model.words)], key % len(model.words))
            for key in grams.keys.tolist()
        ]
        values = zip(grams.log_probs.tolist(), grams.backoffs.tolist(), strict=True)
        listed.update(zip(longer, values, strict=True))
        shorter = longer
    return listed


def back_off(listed: Table, history: tuple[int, ...], word: int) -> float:
    """Score a word by the definition."""
    if (*history, word) in listed:
        return listed[*history, word][0]
    return listed.get(history, (0, 0))[1] + back_off(listed, history[1:], word)


@pytest.fixture(scope="module", params=["words", "words_pruned", "characters", "tiny"])
def model(request: pytest.FixtureRequest) -> NgramModel:
    return read_arpa(DATA / f"{request.param}.arpa")


def test_a_walk_scores_every_word_with_all_its_history(model: NgramModel) -> None:
    listed, random_numbers = table(model), random.Random(0)
    for _ in range(40):
        state, history = model.start, (BEGIN,)
        for _ in range(12):
            known = [gram[-1] for gram in listed if gram[:-1] == history[-1:] and gram[-1] > END]
            anything = range(3, len(model.words))
            word = random_numbers.choice([*known, 0, random_numbers.choice(anything)])
            expected = back_off(listed, history[1 - model.order :], word)
            log_prob, state = model.score(state, word)
            assert log_prob == pytest.approx(expected, abs=1e-9)
            history = (*history, word)


def test_states_are_the_shortest_that_suffice(model: NgramModel) -> None:
    listed = table(model)
    followed = {gram[:-1] for gram in listed}
    for gram in listed:
        history = gram[max(0, len(gram) - model.order + 1) :]
        _, state = model.score(gram[:-1][1 - model.order :], gram[-1])
        assert state == history[len(history) - len(state) :]
        if state:  # without its first word it would say less
            assert state in followed or listed[state][1]
        longer = history[: len(history) - len(state)]
        for start in range(len(longer)):  # what was dropped says nothing
            dropped = history[start:]
            assert dropped not in followed and not listed.get(dropped, (0, 0))[1]


def test_unknown_words_lead_to_the_empty_state() -> None:
    model = read_arpa(DATA / "words.arpa")
    assert "boat" in model and "zebra" not in model
    assert model.id_of("zebra") == 0
    assert model.score(model.start, 0)[1] == ()
    assert model.start == (BEGIN,)
    assert train([["a"]], order=1).model.start == ()


def test_a_back_off_without_longer_ngrams_stays_in_the_state() -> None:
    def grams(keys: list[int], log_probs: list[float], backoffs: list[float]) -> Grams:
        values = (np.array(each, np.float32) for each in (log_probs, backoffs))
        return Grams(np.array(keys, np.int64), *values)

    words = ("<unk>", "<s>", "</s>", "a", "b")
    unigrams = grams([0, 1, 2, 3, 4], [-4, -9, -1, -1, -2], [0, -0.5, 0, 0, -0.25])
    model = NgramModel(words, (unigrams, grams([1 * 5 + 3], [-0.1], [0])))
    assert model.score((BEGIN,), 3) == (pytest.approx(-0.1), ())
    assert model.score((BEGIN,), 4) == (-2.5, (4,))
    assert model.score((4,), 3) == (-1.25, ())


def test_higher_orders_know_their_own_text_better() -> None:
    text = [line.split() for line in SENTENCES]
    models = [train(text, order=order).model for order in (1, 2, 3)]
    totals = [sum(sentence_log_prob(model, line) for line in text) for model in models]
    assert totals == sorted(totals)


def test_what_is_remembered_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    free, bounded = (read_arpa(DATA / "characters.arpa") for _ in range(2))
    lines = [[*line.replace(" ", "▁")] for line in SENTENCES]
    expected = [sentence_log_prob(free, line) for line in lines]
    monkeypatch.setattr(ngram, "REMEMBERED", 8)
    for _ in range(2):
        assert [sentence_log_prob(bounded, line) for line in lines] == expected
    assert len(bounded._answers) <= 8 and len(bounded._rows) <= 8 + bounded.order
