"""Pieces of real tokenizers spell the words that the tokenizer itself decodes."""

from pathlib import Path

import pytest

from sbkit.decoding.spelling import Spelling
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer

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
