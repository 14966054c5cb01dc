"""ARPA files are read as they were written, and a damaged file is refused in one sentence."""

import math
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.lm.arpa import read_arpa, write_arpa
from sbkit.lm.kneser_ney import train
from sbkit.lm.ngram import NO_HISTORY
from tests.decoding.by_definition import sentence_log_prob, state_after

DATA = Path(__file__).parent / "data"
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
    assert model.score(NO_HISTORY, model.id_of("zebra"))[0] == pytest.approx(-99 * math.log(10))


def test_read_arpa_accepts_unk_in_capitals(tmp_path: Path) -> None:
    text = SMALL.replace("-1\t<unk>", "-3\t<UNK>").replace("a b", "a <UNK>")
    model = read_arpa(written(tmp_path, text))
    assert model.score(NO_HISTORY, 0)[0] == pytest.approx(-3 * math.log(10))
    after_a = state_after(model, model.id_of("a"))
    assert model.score(after_a, 0)[0] == pytest.approx(-0.1 * math.log(10))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("\\end\\", "", "it is truncated, expected \\end\\ after 3 2-grams"),
        ("\\data\\", "data", "it has no \\data\\ line"),
        ("ngram 1=5\nngram 2=3\n", "", "expected 'ngram 1=COUNT' in line 5, found '\\\\1-grams:'"),
        ("ngram 1=5", "ngram 1=x4", "expected 'ngram 1=COUNT' in line 4, found 'ngram 1=x4'"),
        ("ngram 2=3", "ngram 3=3", "expected 'ngram 2=COUNT' in line 5, found 'ngram 3=3'"),
        ("ngram 2=3", "ngram 2=4", "expected one of 4 2-grams"),
        ("ngram 2=3", "ngram 2=2", "expected \\end\\ after 2 2-grams in line 17"),
        ("ngram 1=5", "ngram 1=4", "expected \\2-grams: after as many 1-grams as declared"),
        ("\\1-grams:", "\\3-grams:", "expected \\1-grams: in line 7"),
        ("-0.5\ta", "nan\ta", "in line 10"),
        ("-0.5\ta", "0.5\ta", "(a log10 probability, 1 word and perhaps a back-off)"),
        ("-0.1\ta b", "-0.1\ta b a b", "2 words and perhaps a back-off"),
        ("-0.125\tb </s>", "-0.125\ta b", "it lists some 2-grams more than once"),
        ("-0.1\ta b", "-0.1\ta \x1b[2J", "only words that are listed as unigrams in line 15"),
        ("-99\t<s>", "-99\tS", "<s> is missing from its unigrams"),
        ("-1\t</s>", "-1\tS", "</s> is missing from its unigrams"),
        ("-2\tb", "-2\ta", "expected 'a' only once among the unigrams in line 11"),
        ("-2\tb", "-2\t<UNK>", "expected '<unk>' only once among the unigrams in line 12"),
        ("-2\tb", "-2\t\udcff", "expected a word in UTF-8 in line 11"),
    ],
)
def test_read_arpa_refuses_damaged_file(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = written(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(SbkitError) as refusal:
        read_arpa(path)
    assert sentence in str(refusal.value)
    assert str(refusal.value).endswith("Make or fetch the file again.")
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_read_arpa_refuses_an_ngram_without_its_prefix(tmp_path: Path) -> None:
    text = (DATA / "tiny.arpa").read_text().replace("\told boat\t", "\tboat old\t", 1)
    with pytest.raises(SbkitError, match="some 3-grams begin with a 2-gram that it does not list"):
        read_arpa(written(tmp_path, text))
