"""Train language models of words and of tokens on texts, or read them from an ARPA file."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.base.checksums import checksum
from sbkit.base.errors import ConfigError, DataError, SbkitError, concerning
from sbkit.base.files import require_writable, to_json
from sbkit.base.messages import plural
from sbkit.base.versions import TEXT_PACKAGES, package_versions
from sbkit.lm.arpa import is_arpa, read_arpa, write_arpa
from sbkit.lm.kneser_ney import TrainedNgrams, train
from sbkit.lm.language_models import (
    LM_VERSION,
    TOKENS,
    WORDS,
    hash_sentences,
    load,
    plain_text,
    save,
    tokenizer_digest,
)
from sbkit.lm.ngram import SPECIAL, NgramModel
from sbkit.text.normalization import TEXT_VERSION, TextTable, is_mark, table_to_store
from sbkit.text.tokenizer import SPACE, TOKENIZER_FILE, Tokenizer, draw_sentences

MIN_SPELLED_SHARE = 0.5  # of the letters of a text, or of the words of an ARPA file
# A model of words without case and punctuation may have a few abbreviations with them.
MAX_MARKED_SHARE = 0.02
# Bytes of text that a model is trained on; from more text, sentences are drawn. Counting 3-grams of
# words takes 22 times as much memory, 6-grams of characters 60 times.
MAX_LM_TEXT_BYTES = {WORDS: 75_000_000, TOKENS: 30_000_000}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LmText:
    """The text, or the ARPA file, that language models are made of.

    files: the texts of `lm_text`; without any, the transcripts are used.
    arpa: a file that replaces one model: the model of tokens if one of its words has a `▁`, else
        the model of words.
    source: identifies the text and the ARPA file, and all that decides how they are read.
    sentences: returns the normalized sentences to train on.
    held_out: the normalized sentences of splits, by name, which are excluded from training.
    """

    files: Sequence[Path] = ()
    arpa: Path | None = None
    source: str = ""
    sentences: Callable[[], Iterable[str]] = tuple
    held_out: Mapping[str, Iterable[str]] = field(default_factory=dict)

    @classmethod
    def from_setting(cls, value: Any) -> "LmText":
        """Sort the files: null, a path or a list of paths."""
        names = value if isinstance(value, list) else [value]
        files = [Path(name).expanduser() for name in names if name is not None]
        arpa = next(filter(is_arpa, files), None)
        if arpa is not None and len(files) > 1:
            raise ConfigError(
                f"`lm_text` names the ARPA file {arpa} and other files. Name only the ARPA file."
            )
        source = " ".join(map(checksum, files))
        return cls(files=files if arpa is None else [], arpa=arpa, source=source)


@dataclass(frozen=True, kw_only=True)
class LmTextEncoder:
    """How a model of words and a model of tokens write a text.

    table: the text table of the sentences, if it keeps case or punctuation.
        The model of words then has neither, so that "Line," and "line" are one word.
    """

    tokenizer: Tokenizer
    table: TextTable | None = None

    @cached_property
    def word_table(self) -> TextTable | None:
        """The table that normalizes words before they are looked up, as in `NgramModel`."""
        if self.table is None or self.table.is_plain:
            return None
        return self.table.plain

    def words(self, text: str) -> list[str]:
        return plain_text(text, self.table).split()

    def tokens(self, text: str) -> list[str]:
        """Return the pieces of a text's tokens, without unknown tokens."""
        unknown = self.tokenizer.vocabulary.unk
        ids = self.tokenizer.encode(text)
        return [self.tokenizer.piece(token) for token in ids if token != unknown]


@concerning("lm_text")
def ensure_language_models(
    file: Path, text: LmText, orders: Mapping[str, int], text_encoder: LmTextEncoder
) -> list[str]:
    """Make the language models of a run, unless the file has them; return messages about them.

    orders: the n-gram orders of ``WORDS`` and ``TOKENS``, 0 for no model.
    """
    to_plain = partial(plain_text, table=text_encoder.table)
    held_out_texts = set(map(to_plain, chain.from_iterable(text.held_out.values())))
    made_from = {
        "text": text.source,
        "held_out": sorted(held_out_texts),
        "orders": [orders[WORDS], orders[TOKENS]],
        "table": text_encoder.table and table_to_store(text_encoder.table),
        "code": [TEXT_VERSION, LM_VERSION],
        "packages": package_versions(TEXT_PACKAGES),
    }
    metadata = {
        "made_from": hashlib.sha256(to_json(made_from).encode()).hexdigest(),
        "tokenizer": tokenizer_digest(text_encoder.tokenizer),
    }
    with suppress(SbkitError):  # if there is no file, or it is damaged
        if metadata.items() <= load(file)[1].items():
            return []
    models = {} if text.arpa is None else _read_arpa_model(text.arpa, orders, text_encoder)
    messages = [f"language model of {name}: {text.arpa}" for name in models]
    num_left_out = 0

    def training_sentences() -> Iterator[str]:
        nonlocal num_left_out
        for sentence in filter(str.strip, text.sentences()):
            if to_plain(sentence) in held_out_texts:
                num_left_out += 1
            else:
                yield sentence

    max_bytes = max(MAX_LM_TEXT_BYTES.values())
    sentences, num_sentences = draw_sentences(training_sentences(), max_bytes)
    if text.held_out:
        count = plural(num_left_out, "sentence")
        left_out = f"{count} left out, because {' or '.join(text.held_out)} has the same"
        if not sentences and any(orders.values()):
            raise DataError(f"`lm_text` has no sentence to learn from ({left_out}).")
        messages.append(f"lm_text: {left_out}")
    words = Counter(chain.from_iterable(map(str.split, sentences)))
    spelling_notes = _check_spelling(words, text_encoder.tokenizer)
    for name, order in orders.items():
        if order and name not in models:
            sample, _ = draw_sentences(sentences, MAX_LM_TEXT_BYTES[name])
            amount = f"{len(sample):,} of {num_sentences:,} sentences"
            logger.info(f"language model of {name}: training on {amount}")
            split = text_encoder.words if name == WORDS else text_encoder.tokens
            trained = train(map(split, sample), order=order)
            table = text_encoder.word_table if name == WORDS else None
            models[name] = replace(trained.model, table=table)
            messages.append(_describe(name, trained))
    if WORDS in models and models[WORDS].table is not None:
        messages.append("words of the language model: without case and punctuation")
    is_trained = bool(models) and text.arpa is None
    seen = np.unique(hash_sentences(map(to_plain, sentences))) if is_trained else None
    save(models, file, metadata=metadata, seen=seen)
    return messages + spelling_notes


def replace_language_models(
    file: Path, text: LmText, orders: Mapping[str, int], text_encoder: LmTextEncoder
) -> list[str]:
    """Train the language models of a file again on texts; return messages about them.

    An ARPA file replaces only the model of words or the model of tokens.

    orders: the n-gram orders that change.
    """
    models = load(file)[0] if file.exists() else {}
    current_orders = {name: model.order for name, model in models.items()}
    orders = {WORDS: 0, TOKENS: 0, **current_orders, **orders}
    file.unlink(missing_ok=True)
    if text.arpa is None:
        return ensure_language_models(file, text, orders, text_encoder)
    models |= _read_arpa_model(text.arpa, orders, text_encoder)
    models = {name: model for name, model in models.items() if orders[name]}
    metadata = {"made_from": text.source, "tokenizer": tokenizer_digest(text_encoder.tokenizer)}
    save(models, file, metadata=metadata)
    return [f"language model: {text.arpa}"]


def write_language_model(
    out: Path, sentences: Iterable[str], *, order: int, tokenizer: Path | None
) -> str:
    """Train a language model, write it as an ARPA file, and return messages about it.

    sentences: normalized.
    tokenizer: a run, a bundle or a tokenizer's file for a model of tokens; None for a model of
        words.
    """
    require_writable(out.parent, option="--out")
    if tokenizer is None:
        trained = train(map(str.split, sentences), order=order)
        messages = [_describe(WORDS, trained)]
    else:
        file = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
        text_encoder = LmTextEncoder(tokenizer=Tokenizer(model_file=file))
        words = Counter[str]()

        def split_and_count() -> Iterator[list[str]]:
            for sentence in sentences:
                words.update(sentence.split())
                yield text_encoder.tokens(sentence)

        trained = train(split_and_count(), order=order)
        messages = [_describe(TOKENS, trained), *_check_spelling(words, text_encoder.tokenizer)]
    write_arpa(trained.model, out)
    return "\n".join(messages)


def _describe(name: str, trained: TrainedNgrams) -> str:
    line = (
        f"language model of {name}: {trained.model.order}-grams of {trained.num_tokens} {name} in "
        f"{trained.num_sentences} sentences, {len(trained.model.words) - len(SPECIAL)} different "
        f"{name}"
    )
    if trained.fallback_orders:
        orders = ", ".join(map(str, trained.fallback_orders))
        line += f" (too little text to estimate discounts of order {orders}: using 0.5, 1 and 1.5)"
    return line


def _check_spelling(words: Counter[str], tokenizer: Tokenizer) -> list[str]:
    """Return a message about the share of words that the tokens cannot spell, if there are any.

    If more than half of the letters are in no token, the text is in another language. (Letters are
    counted because a Chinese "word" is a whole sentence, which often has a rare letter.)
    """
    known_letters = {*"".join(tokenizer.texts)}
    num_letters = num_known = num_spelled = 0
    for word, count in words.items():
        num_letters += count * len(word)
        num_known += count * sum(letter in known_letters for letter in word)
        num_spelled += count * known_letters.issuperset(word)
    share = 1 - num_spelled / max(1, words.total())
    message = f"{share:.1%} of the text's words have letters that no token spells"
    if num_known < MIN_SPELLED_SHARE * num_letters:
        raise DataError(
            f"The recognizer's tokens cannot spell the text of the language model: {message}."
        )
    return [message] if num_spelled < words.total() else []


def _read_arpa_model(
    file: Path, orders: Mapping[str, int], text_encoder: LmTextEncoder
) -> dict[str, NgramModel]:
    """Read a model of words or of tokens."""
    tokenizer = text_encoder.tokenizer
    model = read_arpa(file)
    words = model.words[len(SPECIAL) :]
    if any(SPACE in word for word in words):
        name = TOKENS
        num_spelled = len({*tokenizer.texts}.intersection(words))
    else:
        name = WORDS
        num_spelled = sum(tokenizer.spelling(word) != "" for word in words)
    if model.order != orders[name]:
        raise ConfigError(
            f"{file} is a {model.order}-gram model of {name}. Set `{name[:-1]}_lm_order: "
            f"{model.order}`.",
            keys=(f"{name[:-1]}_lm_order",),
        )
    if num_spelled <= MIN_SPELLED_SHARE * len(words):
        raise DataError(
            f"The recognizer's tokens spell only {num_spelled} of the {len(words)} {name} of "
            f"{file}. Train it on text that is normalized like the transcripts."
        )
    num_marked = sum(word != word.lower() or is_mark(word[-1]) for word in words)
    if name == WORDS and num_marked <= MAX_MARKED_SHARE * len(words):
        model = replace(model, table=text_encoder.word_table)
    return {name: model}
