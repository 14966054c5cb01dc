"""Models equal KenLM's lmplz, and the probabilities in every context sum to one."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.lm.arpa import read_arpa
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import BEGIN
from tests.decoding.by_definition import state_after

DATA = Path(__file__).parent / "data"
SENTENCES = (DATA / "sentences.txt").read_text().splitlines()


def spell(sentence: str) -> list[str]:
    return [*sentence.replace(" ", "▁")]


def cut(sentence: str) -> list[str]:
    """Cut words into pieces of four characters."""
    words = [f"▁{word}" for word in sentence.split()]
    return [word[i : i + 4] for word in words for i in range(0, len(word), 4)]


@pytest.mark.parametrize(
    ("name", "split", "lines", "fallback_orders"),
    [
        ("words", str.split, SENTENCES, ()),
        ("characters", spell, [*SENTENCES[:2], *SENTENCES[3:8]], (2, 4, 5)),
        ("pieces", cut, SENTENCES[:14], ()),
        ("tiny", str.split, SENTENCES[:2], (2, 3)),
    ],
)
def test_train_equals_lmplz(
    name: str, split: Callable[[str], list[str]], lines: list[str], fallback_orders: tuple[int, ...]
) -> None:
    reference = read_arpa(DATA / f"{name}.arpa")
    trained = train(map(split, lines), order=reference.order)
    assert trained.model.words == reference.words
    assert trained.fallback_orders == fallback_orders
    for grams, expected in zip(trained.model.grams, reference.grams, strict=True):
        assert np.array_equal(grams.keys, expected.keys)
        np.testing.assert_allclose(grams.log_probs, expected.log_probs, atol=1e-5, rtol=0)
        np.testing.assert_allclose(grams.backoffs, expected.backoffs, atol=1e-5, rtol=0)


def random_sentences(numbers: random.Random) -> list[list[str]]:
    words = [f"w{index}" for index in range(numbers.randint(1, 9))]
    counts = (numbers.randint(0, 7) for _ in range(numbers.randint(1, 30)))
    return [*(numbers.choices(words, k=count) for count in counts), words]


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_probabilities_sum_to_one_in_every_context(order: int) -> None:
    numbers = random.Random(order)
    for _ in range(4):
        sentences = random_sentences(numbers)
        model = train(sentences, order=order).model
        histories = {(BEGIN,), ()}
        for sentence in sentences:  # contexts in the text, of all lengths
            ids = [BEGIN, *map(model.id_of, sentence)]
            spans = itertools.product(range(len(ids)), range(order))
            histories |= {tuple(ids[start : start + length]) for start, length in spans}
        for _ in range(10):  # and any contexts
            histories.add(tuple(numbers.choices(range(len(model.words)), k=order - 1)))
        predicted = [word for word in range(len(model.words)) if word != BEGIN]
        for history in histories:
            state = state_after(model, *history)
            log_probs = [model.score(state, word)[0] for word in predicted]
            assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-6), history


@pytest.mark.parametrize(
    ("sentences", "order", "sentence"),
    [
        ([["a"]], 0, "order of a language model must be from 1 to 10, but is 0"),
        ([[], []], 2, "text with at least one word, but this text has none"),
    ],
)
def test_train_refuses_unusable_text(sentences: list[list[str]], order: int, sentence: str) -> None:
    with pytest.raises(SbkitError, match=sentence):
        train(sentences, order=order)
