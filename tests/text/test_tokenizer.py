"""Decoding inverts encoding in any script."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.text import tokenizer
from sbkit.text.tokenizer import Tokenizer, ensure_tokenizer
from sbkit.text.vocabulary import Vocabulary

SENTENCES = [
    "the quick brown fox jumps over the lazy dog's back",
    "съешь же ещё этих мягких французских булок да выпей чаю",
    "我们 今天 去 学校 学习 中文",
]
KINDS: list[tuple[str, int | None]] = [("char", None), ("bpe", 100), ("unigram", 77)]


def train(
    folder: Path, kind: str, vocab_size: int | None, texts: Iterable[str] = SENTENCES * 20
) -> Tokenizer:
    file = folder / "tokenizer.model"
    return ensure_tokenizer(
        model_file=file, token_type=kind, vocab_size=vocab_size, texts=lambda: texts
    )


@pytest.mark.parametrize(("kind", "vocab_size"), KINDS)
def test_decode_inverts_encode_in_three_scripts(tmp_path: Path, kind: str, vocab_size: Any) -> None:
    tokenizer = train(tmp_path, kind, vocab_size)
    assert tokenizer.vocabulary == Vocabulary(size=tokenizer.vocab_size)
    assert tokenizer.pieces()[:4] == ["<blank>", "<unk>", "<s>", "</s>"]
    for text in [*SENTENCES, " ".join(SENTENCES), "fox", ""]:
        ids = tokenizer.encode(text)
        tokenizer.vocabulary.check_targets(ids, clip=text)
        assert tokenizer.vocabulary.unk not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.words([0, 1, *ids, 2, 3]) == text.split()  # special tokens leave no trace
        assert tokenizer.spelling(text) == "▁".join(text.split())
    assert tokenizer.spelling("fox ñ") == ""


def test_mark_stands_behind_its_word(tmp_path: Path) -> None:
    """A model may write a space before a mark, or begin with one: ". Please"."""
    tokenizer = train(tmp_path, "char", None, ["Wait, please. ¿Sí?"])
    for written, text in ((". Please", "Please"), ("Wait , please .", "Wait, please."), ("?", "")):
        ids = [tokenizer.pieces().index(char) for char in written.replace(" ", "▁") if char != "P"]
        assert tokenizer.decode(ids) == text.replace("P", "")
    assert tokenizer.decode(tokenizer.encode("Wait. ¿Sí?")) == "Wait. ¿Sí?"


@pytest.mark.parametrize(("kind", "vocab_size"), KINDS)
def test_unseen_character_is_unk_never_blank(tmp_path: Path, kind: str, vocab_size: Any) -> None:
    tokenizer = train(tmp_path, kind, vocab_size)
    for text in ("ñ", "<unk>", "<blank>", "</s>", "fox ñ fox"):
        ids = tokenizer.encode(text)
        assert tokenizer.vocabulary.unk in ids
        assert not {0, 2, 3} & set(ids)
    assert tokenizer.decode(tokenizer.encode("fox ñ fox")) == "fox fox"


@pytest.mark.parametrize(("kind", "vocab_size"), KINDS)
def test_same_text_gives_same_model_bytes(tmp_path: Path, kind: str, vocab_size: Any) -> None:
    files = [train(tmp_path / name, kind, vocab_size).model_file for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(("kind", "vocab_size"), KINDS)
def test_tokens_of_drawn_sentences_spell_the_others(
    tmp_path: Path,
    kind: str,
    vocab_size: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(tokenizer, "MAX_TRAINING_BYTES", 2000)
    texts = [*SENTENCES * 20, "ñandú ø"]
    assert train(tmp_path, kind, vocab_size and vocab_size + 4, texts).can_spell(texts)
    assert caplog.messages == ["tokenizer: trained on 34 drawn sentences of 61"]


@pytest.mark.parametrize(("kind", "vocab_size"), [("char", None), ("bpe", 30), ("unigram", 21)])
def test_long_sentence_is_not_dropped(tmp_path: Path, kind: str, vocab_size: Any) -> None:
    long = "xyz uvw " * 1000
    assert len(long) > 4192  # bytes; sentencepiece's default limit
    tokenizer = train(tmp_path, kind, vocab_size, ["abc def ghi"] * 9 + [long])
    assert tokenizer.decode(tokenizer.encode("zux")) == "zux"


@pytest.mark.parametrize("requested", [*KINDS, ("bpe", 90)])
@pytest.mark.parametrize("earlier", KINDS)
def test_earlier_tokenizer_is_kept_if_it_is_what_is_declared(
    tmp_path: Path, earlier: tuple[str, int | None], requested: tuple[str, int | None]
) -> None:
    first = train(tmp_path / "earlier", *earlier)
    assert first.token_type == earlier[0]
    for folder, texts in (("fits", ["fox fox dog lazy quick"]), ("lacks a letter", ["fox fôx"])):
        kind, size = requested
        is_kept = requested == earlier and folder == "fits"
        try:
            tokenizer = ensure_tokenizer(
                model_file=tmp_path / folder / "tokenizer.model",
                token_type=kind,
                vocab_size=size,
                texts=partial(iter, texts),
                init_file=first.model_file,
            )
        except ConfigError:  # these texts do not have so many tokens
            assert size is not None
            assert not is_kept
        else:
            assert (tokenizer.content == first.content) is is_kept


REFUSED: dict[str, tuple[str, Any, Iterable[str], str]] = {
    "too small": ("bpe", 10, SENTENCES, r"bpe tokenizer of 10 tokens .* 10 vs \d+\."),
    "too large": ("unigram", 5000, SENTENCES, r"of 5000 tokens .*value <= \d+\."),
    "size of characters": ("char", 99, SENTENCES, r"is 99. The training text has \d+ tokens"),
    "no text": ("char", None, [], "needs training text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_vocab_size_that_cannot_be_met_is_refused(tmp_path: Path, case: str) -> None:
    kind, vocab_size, texts, message = REFUSED[case]
    with pytest.raises(SbkitError, match=message):
        train(tmp_path, kind, vocab_size, texts)


def test_damaged_model_file_is_named(tmp_path: Path) -> None:
    file = train(tmp_path, "char", None).model_file
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(SbkitError, match="sentencepiece model") as caught:
        Tokenizer(model_file=file)
    assert str(file) in str(caught.value)
