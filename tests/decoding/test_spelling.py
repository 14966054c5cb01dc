"""Pieces of real tokenizers spell the words that the tokenizer itself decodes."""

from pathlib import Path

import pytest

from sbkit.decoding.spelling import Spelling
from sbkit.decoding.word_scorer import WordScorer, make_lexicon
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer
from tests.decoding.by_definition import random_model, sentence_log_prob

TEXTS = ("the cat sat on the mat", "a cat and the other cat", "that mat is the cat's", "on and on")
WORDS = ("the", "cat", "cat's", "on", "mat")


@pytest.fixture(params=[("char", None), ("bpe", 30), ("unigram", 26)], ids=lambda each: each[0])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    kind, size = request.param
    return ensure_tokenizer(
        model_file=tmp_path / "tokenizer.model", kind=kind, vocab_size=size, texts=lambda: TEXTS
    )


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    return Spelling(pieces=tokenizer.pieces(), spell=tokenizer.encode)


@pytest.mark.parametrize("text", [*TEXTS, "", "tea", "mat  mat "])
def test_words_are_those_that_the_tokenizer_decodes(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    spelling = spelling_of(tokenizer)
    assert spelling.words(tokens) == tokenizer.decode(tokens).split() == text.split()
    assert spelling.words([0, 1, *tokens, 2, 3]) == text.split()  # special tokens leave no trace
    assert spelling.letters(text) == "▁".join(text.split())


def test_what_has_no_piece_cannot_be_spelled(tokenizer: Tokenizer) -> None:
    assert spelling_of(tokenizer).letters("the dog") == ""


@pytest.mark.parametrize("text", ["the cat sat on", "cat's", "", "on the mat the"])
def test_a_word_model_gives_encoded_text_its_own_score(tokenizer: Tokenizer, text: str) -> None:
    model, spelling = random_model(WORDS, seed=1), spelling_of(tokenizer)
    scorer = WordScorer(
        lm=model,
        lexicon=make_lexicon(model, spelling),
        spelling=spelling,
        lm_weight=1.0,
        unknown_word_score=-4.0,
    )
    total, state = 0.0, scorer.start()
    for token in tokenizer.encode(text):
        score, state = scorer.step(state, token)
        total += score
    unknown = sum(word not in WORDS for word in text.split())
    expected = sentence_log_prob(model, text.split()) - 4.0 * unknown
    assert total + scorer.end(state) == pytest.approx(expected, abs=1e-9)
