"""Language models: every context's probabilities sum to one, and files keep them."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sbkit.base.errors import SbkitError
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import BOS, EOS, UNK, NgramModel
from sbkit.lm.storage import load, save

TEXT = """the bird sings in the tree
the cat looks at the bird
a bird looks at the cat in the tree
the tree stands in the garden
in the garden a cat sleeps
the cat sleeps and the bird sings""".splitlines()


def random_text(seed: int) -> list[list[str]]:
    random = np.random.default_rng(seed)
    words = np.array(list("abcdefg"))
    return [random.choice(words, random.integers(0, 8)).tolist() for _ in range(40)]


def contexts(model: NgramModel) -> list[tuple[int, ...]]:
    """List contexts that are known, and some that are not."""
    ids = [each for each in range(len(model.words)) if each != EOS]
    pairs = [(a, b) for a in ids[:6] for b in ids[1:6]]
    return [(), *((each,) for each in ids), *pairs]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_context_sums_to_one(order: int, seed: int) -> None:
    model = train(random_text(seed), order=order).model
    for context in contexts(model):
        state = context[len(context) - order + 1 :] if len(context) >= order else context
        probabilities = [
            np.exp(model.score(state, word)[0]) for word in range(len(model.words)) if word != BOS
        ]
        assert sum(probabilities) == pytest.approx(1.0, abs=1e-5)


def test_a_bigram_by_hand() -> None:
    """Two sentences "a b" and "a c": the figures follow from the formulas by hand."""
    trained = train([["a", "b"], ["a", "c"]], order=2)
    model = trained.model
    assert (trained.words, trained.sentences, trained.fallback_orders) == (4, 2, (1, 2))
    # Of unigrams a, b, c have one left neighbour each, </s> has two: 5 in all. 0.5 is taken off a
    # count of 1 and 1.0 off a count of 2: 2.5 / 5 is shared by a, b, c, </s> and <unk>.
    a, b = model.id_of("a"), model.id_of("b")
    assert np.exp(model.score((), a)[0]) == pytest.approx(0.5 / 5 + 0.5 / 5)
    assert np.exp(model.score((), EOS)[0]) == pytest.approx(1.0 / 5 + 0.5 / 5)
    assert np.exp(model.score((), UNK)[0]) == pytest.approx(0.5 / 5)
    # "<s> a" is there twice: (2 - 1) / 2, and half of the unigram.
    assert np.exp(model.score((BOS,), a)[0]) == pytest.approx(0.5 + 0.5 * 0.2)
    # "a b" and "a c" once each: 0.5 / 2, and half of the unigram.
    assert np.exp(model.score((a,), b)[0]) == pytest.approx(0.25 + 0.5 * 0.2)


def test_a_state_is_no_longer_than_what_the_model_knows() -> None:
    model = train([line.split() for line in TEXT], order=3).model
    the, unknown = model.id_of("the"), model.id_of("zebra")
    assert unknown == UNK
    _, state = model.score(model.start, the)
    assert state == (BOS, the)
    _, state = model.score(state, unknown)
    assert state == () or state == (UNK,)
    _, after_other = model.score((unknown,), the)
    assert after_other == (the,)


def test_what_was_seen_is_likelier() -> None:
    model = train([line.split() for line in TEXT], order=3).model
    assert model.sentence_log_prob(["the", "cat", "sleeps"]) > model.sentence_log_prob(
        ["sleeps", "cat", "the"]
    )
    assert model.perplexity([line.split() for line in TEXT]) < 10


@pytest.mark.parametrize("order", [0, 11])
def test_an_order_that_makes_no_sense_is_refused(order: int) -> None:
    with pytest.raises(SbkitError, match=f"must be 1 to 10, but is {order}"):
        train([["a"]], order=order)


def test_a_text_without_words_is_refused() -> None:
    with pytest.raises(SbkitError, match="there is no word in it"):
        train([[], []], order=2)


def stored(folder: Path) -> Path:
    model = train([line.split() for line in TEXT], order=3).model
    save({"words": model}, folder / "lm.safetensors", metadata={"tokenizer": "x"})
    return folder / "lm.safetensors"


def test_a_file_keeps_a_model(tmp_path: Path) -> None:
    model = train([line.split() for line in TEXT], order=3).model
    models, about = load(stored(tmp_path))
    assert about["tokenizer"] == "x"
    for line in TEXT:
        words = line.split()
        assert models["words"].sentence_log_prob(words) == model.sentence_log_prob(words)


def change(file: Path, name: str, array: np.ndarray) -> None:
    arrays = safetensors.numpy.load_file(file)
    arrays[f"words.{name}"] = array
    about = {"orders": json.dumps({"words": 3})}
    safetensors.numpy.save_file(arrays, file, metadata=about)


SPOILED = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "no safetensors": lambda file: file.write_bytes(b"ngram 1=5"),
    "unsorted": lambda file: change(file, "keys.2", np.zeros(4, np.int64)),
    "beyond the words": lambda file: change(file, "keys.3", np.array([1 << 60])),
    "not a number": lambda file: change(file, "log_probs.1", np.full(14, np.nan, np.float32)),
    "another size": lambda file: change(file, "log_probs.1", np.zeros(3, np.float32)),
    "words twice": lambda file: change(
        file, "words", np.frombuffer(b"<unk>\n<s>\n</s>\na\na", np.uint8)
    ),
    "no text": lambda file: change(file, "words", np.array([255, 254], np.uint8)),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    file = stored(tmp_path)
    SPOILED[name](file)
    with pytest.raises(SbkitError, match="must be a file of language models, but cannot be read"):
        load(file)
