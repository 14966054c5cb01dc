"""N-gram models equal KenLM's and their definition, and are read and written as ARPA files."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.lm.arpa import read_arpa, write_arpa
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import BEGIN, END, NO_HISTORY, Grams, NgramModel
from tests.decoding.by_definition import sentence_log_prob

DATA = Path(__file__).parent / "data"
SENTENCES = (DATA / "sentences.txt").read_text().splitlines()
Table = dict[tuple[int, ...], tuple[float, float]]


# -- training: the models equal those of lmplz


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


# -- scores


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
            followers = [ids[-1] for ids in values if ids[:-1] == history[-1:] and ids[-1] > END]
            any_word = numbers.choice(range(3, len(model.words)))
            word = numbers.choice([*followers, 0, any_word])
            expected = back_off(values, history[1 - model.order :], word)
            log_prob, state = model.advance(state, word)
            assert log_prob == pytest.approx(expected, abs=1e-9)
            history = (*history, word)


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
    for sentence in (
        ((3, -0.1), (4, -0.5), (4, -2.25), (3, -1.25)),
        ((3, -0.1), (4, -0.5), (3, -0.75)),  # `<s> a b` has no back-off, but a word after it
    ):
        state = model.start
        for word, expected in sentence:
            log_prob, state = model.advance(state, word)
            assert log_prob == pytest.approx(expected)
        assert state == NO_HISTORY


# -- ARPA files

SMALL = """made by hand

\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-99\t<s>\t-0.5
-1\t</s>
-0.5\ta\t0.25
-2\tb
-1\t<unk>

\\2-grams:
-0.1\ta b
-0.25\t<s> a
-0.125\tb </s>

\\end\\
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "model.arpa"
    path.write_text(text, errors="surrogateescape")
    return path


@pytest.mark.parametrize("name", ["words_pruned", "pieces"])
def test_round_trip_changes_nothing(tmp_path: Path, name: str) -> None:
    model = read_arpa(DATA / f"{name}.arpa")
    write_arpa(model, tmp_path / "copy.arpa")
    copy = read_arpa(tmp_path / "copy.arpa")
    assert copy.words == model.words
    for copied, grams in zip(copy.grams, model.grams, strict=True):
        assert np.array_equal(copied.keys, grams.keys)
        np.testing.assert_allclose(copied.log_probs, grams.log_probs, atol=1e-6, rtol=0)
        np.testing.assert_allclose(copied.backoffs, grams.backoffs, atol=1e-6, rtol=0)


def test_words_of_all_scripts_and_empty_orders_survive_a_round_trip(tmp_path: Path) -> None:
    sentences = [["日本", "語\u3000x", "\u00a0", "a\x85b"], ["日本", "e\u0301", "🙂"]]
    model = train(sentences, order=7).model
    write_arpa(model, tmp_path / "model.arpa")
    copy = read_arpa(tmp_path / "model.arpa")
    assert copy.words == model.words and len(copy.grams[6]) == 0
    log_prob, copied = (sentence_log_prob(lm, sentences[0]) for lm in (model, copy))
    assert copied == pytest.approx(log_prob, abs=1e-6)


def test_arpa_without_unk_gives_unknown_words_no_probability(tmp_path: Path) -> None:
    text = SMALL.replace("-1\t<unk>\n", "").replace("ngram 1=5", "ngram 1=4")
    text = f"\ufeff{text}".replace("-99\t", "-inf\t")  # as editors and some tools write
    model = read_arpa(written(tmp_path, text))
    assert model.advance(NO_HISTORY, model.id_of("zebra"))[0] == pytest.approx(-99 * math.log(10))


def test_read_arpa_accepts_unk_in_capitals(tmp_path: Path) -> None:
    text = SMALL.replace("-1\t<unk>", "-3\t<UNK>").replace("a b", "a <UNK>")
    model = read_arpa(written(tmp_path, text))
    assert model.advance(NO_HISTORY, 0)[0] == pytest.approx(-3 * math.log(10))
    _, after_a = model.advance(NO_HISTORY, model.id_of("a"))
    assert model.advance(after_a, 0)[0] == pytest.approx(-0.1 * math.log(10))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("\\end\\", "", "it is truncated, expected \\end\\ after 3 2-grams"),
        ("\\data\\", "data", "it has no \\data\\ line"),
        ("ngram 1=5\nngram 2=3\n", "", "expected 'ngram 1=COUNT' in line 5, found '\\\\1-grams:'"),
        ("ngram 2=3", "ngram 2=4", "expected one of 4 2-grams"),
        ("\\1-grams:", "\\3-grams:", "expected \\1-grams: in line 7"),
        ("-0.5\ta", "nan\ta", "expected one of 5 1-grams in line 10"),
        ("-0.125\tb </s>", "-0.125\ta b", "it lists some 2-grams more than once"),
        ("-2\tb", "-2\ta", "expected 'a' only once among the unigrams in line 11"),
        ("-0.1\ta b", "-0.1\ta \x1b[2J", "only words that are listed as unigrams in line 15"),
        ("-99\t<s>", "-99\tS", "<s> is missing from its unigrams"),
        ("-2\tb", "-2\t\udcff", "expected a word in UTF-8 in line 11"),
    ],
)
def test_read_arpa_refuses_damaged_file(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = written(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(SbkitError) as refusal:
        read_arpa(path)
    assert sentence in str(refusal.value)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_read_arpa_refuses_an_ngram_without_its_prefix(tmp_path: Path) -> None:
    text = (DATA / "tiny.arpa").read_text().replace("\told boat\t", "\tboat old\t", 1)
    with pytest.raises(SbkitError, match="some 3-grams begin with a 2-gram that it does not list"):
        read_arpa(written(tmp_path, text))
