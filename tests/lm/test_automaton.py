"""An automaton scores sentences as its model does."""

from pathlib import Path

import numpy as np
import pytest

from sbkit.lm.automaton import Arcs, Automaton, make_automaton
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import Grams, NgramModel
from tests.decoding.by_definition import sentence_log_prob

SENTENCES = [
    line.split()
    for line in (Path(__file__).parent / "data" / "sentences.txt").read_text().splitlines()
]


def rows(arcs: Arcs) -> dict[tuple[int, int], tuple[int, float]]:
    """List arcs by state and word: where they lead, and their weight."""
    found = zip(*(each.tolist() for each in arcs), strict=True)
    return {(source, word): (target, weight) for source, target, word, weight in found}


def walk(made: Automaton, words: list[int]) -> float:
    """Follow a sentence, and back off only where no arc has the word."""
    said, ends = rows(made.words), rows(made.ends)
    backoffs = {source: to for (source, _), to in rows(made.backoffs).items()}
    state, total = made.start, 0.0
    for word, arcs in [*((word, said) for word in words), (2, ends)]:
        while (state, word) not in arcs:
            state, weight = backoffs[state]
            total += weight
        state, weight = arcs[state, word]
        total += weight
    return total


@pytest.mark.parametrize("order", [1, 3])
def test_every_sentence_has_the_score_of_the_model(order: int) -> None:
    model = train(SENTENCES[:60], order=order).model
    made = make_automaton(model)
    for sentence in SENTENCES[40:80]:
        words = [model.id_of(word) for word in sentence]
        assert walk(made, words) == pytest.approx(sentence_log_prob(model, sentence), abs=1e-4)


def test_orders_may_be_empty() -> None:
    model = train(SENTENCES[:60], order=1).model
    empty = Grams(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32))
    made = make_automaton(NgramModel(model.words, (*model.grams, empty, empty)))
    assert walk(made, [3, 4]) == pytest.approx(sentence_log_prob(model, model.words[3:5]), abs=1e-4)
