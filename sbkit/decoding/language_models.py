"""The language models of a run: of words and of tokens, from the text that it is told to take.

texts, normalized -> words -> model of words; tokens of the tokenizer -> model of tokens -> one file
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.lm.kneser_ney import Trained, train
from sbkit.lm.ngram import NgramModel
from sbkit.lm.storage import load, parse, save
from sbkit.text.normalize import NORMALIZER_VERSION
from sbkit.text.tokenizer import Tokenizer

WORDS, TOKENS = "words", "tokens"


@dataclass(frozen=True)
class LanguageModels:
    """Models that judge the words and the tokens of a text; None for none."""

    words: NgramModel | None
    tokens: NgramModel | None


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What language models are to be.

    source: what tells their text from others; word_order, token_order: of the n-grams, 0 for no
    such model.
    """

    source: str
    word_order: int
    token_order: int


def ensure_language_models(
    file: Path, declared: Declared, *, texts: Callable[[], Iterable[str]], tokenizer: Tokenizer
) -> list[str]:
    """Train the language models of a run, unless the file holds them; return what to say of it.

    ``texts`` returns the normalized sentences to train them on; the tokenizer is the model's.
    """
    about = {
        "made_of": f"{declared.source} {declared.word_order} {declared.token_order}",
        "tokenizer": digest_of(tokenizer),
        "normalizer": str(NORMALIZER_VERSION),
    }
    if file.exists() and about.items() <= _metadata(file).items():
        return []
    sentences = [text for text in texts() if text.strip()]
    models, said = dict[str, NgramModel](), list[str]()
    for name, order, split in (
        (WORDS, declared.word_order, str.split),
        (TOKENS, declared.token_order, partial(to_pieces, tokenizer=tokenizer)),
    ):
        if order:
            trained = train(map(split, sentences), order=order)
            models[name] = trained.model
            said.append(describe_model(name, order, trained))
    save(models, file, metadata=about)
    return said


def to_pieces(text: str, tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of a text as they are written, but those that it does not know."""
    unknown = tokenizer.vocabulary.unk
    return [tokenizer.piece(token) for token in tokenizer.encode(text) if token != unknown]


def describe_model(name: str, order: int, trained: Trained) -> str:
    """Write what a language model was made of."""
    line = (
        f"language model of {name}: {order}-grams of {trained.tokens} {name} in "
        f"{trained.sentences} sentences, {trained.types} different ones"
    )
    if trained.fallback_orders:
        orders = ", ".join(map(str, trained.fallback_orders))
        line += f" (too little text for the discounts of order {orders}: 0.5, 1 and 1.5 are taken)"
    return line


def _metadata(file: Path) -> dict[str, str]:
    try:
        return load(file)[1]
    except SbkitError:
        return {}


def digest_of(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer."""
    return hashlib.sha256(tokenizer.content).hexdigest()


def load_language_models(
    file: Path, tokenizer: Tokenizer, content: bytes | None = None
) -> LanguageModels:
    """Read the language models of a tokenizer; ``content`` is that of the file where it was read.

    Raises:
        SbkitError: the file cannot be read, or is of another tokenizer.
    """
    models, about = load(file) if content is None else parse(content, of=file)
    if about.get("tokenizer") != digest_of(tokenizer):
        raise SbkitError(
            f"{file} must be of the model's own tokenizer, but is of another one "
            f"({printable(str(about.get('tokenizer')))[:12]}...). Train the language models again."
        )
    return LanguageModels(models.get(WORDS), models.get(TOKENS))


def unknown_share(model: NgramModel, texts: Sequence[str]) -> float:
    """Return the share of words in some texts that a model does not know."""
    words = [word for text in texts for word in text.split()]
    return sum(model.id_of(word) == 0 for word in words) / max(1, len(words))
