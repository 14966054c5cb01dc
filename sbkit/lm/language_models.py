"""Language models of words and of tokens: trained, read from ARPA, and stored in one file.

normalized text -> its words -> model of words
                -> its tokens -> model of tokens -> one file of both

The file is safetensors. Each model has a name, `words` or `tokens`; its arrays are `NAME.keys_2`,
`NAME.log_probs_1` and so on, and its words are one text. `seen` has hashes of the sentences that
they were trained on; an ARPA file does not tell. Loading runs no code, and takes no more
memory than the file.
"""

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from sbkit.base.arrays import Array
from sbkit.base.checksums import checksum
from sbkit.base.errors import BundleError, ConfigError, DataError, SbkitError
from sbkit.base.files import iter_raw_lines, read_regular, require_writable, write_bytes_atomically
from sbkit.base.messages import plural
from sbkit.lm.arpa import DATA_HEADER, read_arpa, write_arpa
from sbkit.lm.kneser_ney import TrainedNgrams, train
from sbkit.lm.ngram import SPECIAL, Grams, NgramModel
from sbkit.lm.seen import SEEN, count_seen, draw_hashes
from sbkit.text.drawing import draw_sentences
from sbkit.text.normalization import (
    NORMALIZER_VERSION,
    Orthography,
    is_mark,
    normalize,
    table_from_stored,
    table_to_store,
)
from sbkit.text.tokenizer import SPACE, TOKENIZER_FILE, Tokenizer

WORDS, TOKENS = "words", "tokens"
MAX_FILE_BYTES = 1 << 33
FIELDS = ("keys", "log_probs", "backoffs")
MAX_PREAMBLE_LINES = 1000  # above the data of an ARPA file, such as IRSTLM's
MIN_SPELLED_SHARE = 0.5  # of the letters of a text, or of the words of an ARPA file
# A model of words without case and punctuation may have a few abbreviations with them.
MAX_MARKED_SHARE = 0.02
SEEN_HASHES = "seen"  # the array of `draw_hashes`
WORD_TABLE = "word_table"  # in the metadata: `NgramModel.table` of the model of words
SUBJECT = "The text of a language model"  # in errors
KENLM_HEADER = b"mmap lm http://kheafield.com/code"  # of a binary file of KenLM
# Bytes of text that a model learns from, of more text in drawn sentences; and the memory that a
# byte takes to be counted, in 3-grams of words or 6-grams of characters.
MAX_TEXT_BYTES = {WORDS: 75_000_000, TOKENS: 30_000_000}
MEMORY_OF_BYTE = {WORDS: 22, TOKENS: 60}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LanguageModels:
    """The language models of a decoder, of words and of tokens; None for no model.

    seen: hashes of the sentences that they were trained on; None if these are not known.
    """

    words: NgramModel | None
    tokens: NgramModel | None
    seen: Array | None = None

    def count_seen(self, texts: Iterable[str], table: Orthography) -> dict[str, Any]:
        """Return the figure SEEN of the normalized texts of a test set; {} if it is not known."""
        plain = map(_plain_normalizer(table), texts)
        return {} if self.seen is None else {SEEN: count_seen(self.seen, plain)}


class LmText(NamedTuple):
    """The files of `lm_text`: texts or one ARPA file; without any, transcripts are the text."""

    texts: Sequence[Path]
    arpa: Path | None
    source: str  # identifies the contents

    @classmethod
    def from_knob(cls, value: Any) -> "LmText":
        """Sort the files: null, a path or a list of paths; raises SbkitError if one is unusable."""
        names = value if isinstance(value, list) else [value]
        files = [Path(name).expanduser() for name in names if name is not None]
        arpa = next(filter(is_arpa, files), None)
        if arpa is not None and len(files) > 1:
            raise ConfigError(
                f"`lm_text` names the ARPA file {arpa} with other files. Name it alone, or only "
                "texts."
            )
        return cls(files if arpa is None else [], arpa, " ".join(map(checksum, files)))


# ---- the file


def save(
    models: Mapping[str, NgramModel],
    file: Path,
    *,
    metadata: Mapping[str, str],
    seen: Array | None = None,
) -> None:
    """Write models and their metadata; equal models and metadata give equal bytes."""
    arrays: dict[str, Array] = {} if seen is None else {SEEN_HASHES: seen}
    for name, model in models.items():
        arrays[f"{name}.words"] = np.frombuffer("\n".join(model.words).encode(), np.uint8)
        for order, grams in enumerate(model.grams, start=1):
            for field in FIELDS:
                arrays[f"{name}.{field}_{order}"] = np.ascontiguousarray(getattr(grams, field))
    orders = {name: model.order for name, model in models.items()}
    table = models[WORDS].table if WORDS in models else None
    if table is not None:
        metadata = {**metadata, WORD_TABLE: json.dumps(table_to_store(table), sort_keys=True)}
    content = safetensors.numpy.save(arrays, metadata={"orders": json.dumps(orders), **metadata})
    write_bytes_atomically(file, _sort_metadata(content))


def _sort_metadata(content: bytes) -> bytes:
    """Sort the metadata of a safetensors file, whose order safetensors does not fix."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def load(
    file: Path, content: bytes | None = None
) -> tuple[dict[str, NgramModel], dict[str, str], Array | None]:
    """Read models, metadata and the hashes of sentences, from ``content`` if known.

    Raises BundleError for a damaged file.
    """
    if content is None:
        subject = "A file of language models"
        content = read_regular(file, max_bytes=MAX_FILE_BYTES, subject=subject)
    try:
        arrays = safetensors.numpy.load(content)
        length = int.from_bytes(content[:8], "little")  # of the header
        metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
        orders = json.loads(metadata["orders"])
        if not isinstance(orders, dict):
            raise ValueError(f"its orders are {orders!r}")
        models = {name: _make_model(arrays, name, orders[name]) for name in orders}
        if WORD_TABLE in metadata:
            _, table = table_from_stored(json.loads(metadata[WORD_TABLE]))
            models[WORDS] = replace(models[WORDS], table=table)
        seen = arrays.get(SEEN_HASHES)
        if seen is not None and (seen.dtype != np.uint64 or seen.ndim != 1):
            raise ValueError("the hashes of its sentences are damaged")
        return models, metadata, seen
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise BundleError(
            f"{file} is not a file of language models, or is damaged ({type(error).__name__}: "
            f"{error}). Train them again."
        ) from error


def _make_model(arrays: Mapping[str, Array], name: str, order: int) -> NgramModel:
    words = tuple(arrays[f"{name}.words"].tobytes().decode().split("\n"))
    all_grams = tuple(
        Grams(*(arrays[f"{name}.{field}_{n}"] for field in FIELDS)) for n in range(1, order + 1)
    )
    if words[: len(SPECIAL)] != SPECIAL or len(all_grams[0]) != len(words):
        raise ValueError(f"the words of {name} do not match its unigrams")
    num_contexts = 1
    for n, grams in enumerate(all_grams, start=1):
        keys = grams.keys
        columns = (grams.log_probs, grams.backoffs)
        is_valid = (
            keys.dtype == np.int64
            and keys.ndim == 1
            and all(column.dtype == np.float32 and column.shape == keys.shape for column in columns)
            # Keys increase from 0 to below the number of contexts times that of words.
            and (np.diff(keys, prepend=-1, append=num_contexts * len(words)) > 0).all()
            and np.isfinite(columns).all()
            and (grams.log_probs <= 0).all()
        )
        if not is_valid:
            raise ValueError(f"the {n}-grams of {name} are damaged")
        num_contexts = len(grams)
    return NgramModel(words, all_grams)


def load_language_models(
    file: Path, tokenizer: Tokenizer, content: bytes | None = None
) -> LanguageModels:
    """Read the language models of a tokenizer; ``content``: the bytes of the file, if known.

    Raises BundleError if the file belongs to another tokenizer, SbkitError if it cannot be read.
    """
    models, metadata, seen = load(file, content)
    digest = metadata.get("tokenizer")
    if digest != digest_of(tokenizer):
        raise BundleError(
            f"The language models in {file} belong to another tokenizer ({str(digest)[:12]}...). "
            "Train them again."
        )
    return LanguageModels(models.get(WORDS), models.get(TOKENS), seen)


def digest_of(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer."""
    return hashlib.sha256(tokenizer.content).hexdigest()


# ---- training


def ensure_language_models(
    file: Path,
    lm_text: LmText,
    orders: Mapping[str, int],
    *,
    texts: Callable[[], Iterable[str]],
    tokenizer: Tokenizer,
    table: Orthography | None = None,
    plain_words: bool = False,
    held_out: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> list[str]:
    """Train the language models of a run, unless the file has them; return messages about them.

    Args:
        file: the file of both models.
        lm_text: its source identifies the sentences. An ARPA file replaces one model: the model of
            tokens if one of its words has a `▁`, else the model of words.
        orders: of the n-grams of ``WORDS`` and ``TOKENS``, 0 for no model.
        texts: returns the normalized sentences to train on.
        tokenizer: spells the sentences.
        table: the text table of the sentences, if it keeps case or punctuation.
        plain_words: whether the model of words then has neither, so that "Line," and "line" are one
            word; a decoding graph writes the words of its model, so it needs them as written.
        held_out: the normalized sentences of splits, by name. They are left out of the texts.

    Raises:
        SbkitError: the ARPA file cannot be read, or has another order or another spelling.
    """
    word_table = table.plain if plain_words and table and not table.is_plain else None
    to_plain = _plain_normalizer(table)
    excluded = set(map(to_plain, chain.from_iterable(held_out.values())))
    digest = hashlib.sha256("\n".join(sorted(excluded)).encode()).hexdigest()
    source = lm_text.source + digest
    metadata = {
        "made_of": f"{source} {orders[WORDS]} {orders[TOKENS]}{' plain' * bool(word_table)}",
        "tokenizer": digest_of(tokenizer),
        "normalizer": str(NORMALIZER_VERSION),
    }
    with suppress(SbkitError):  # if there is no file, or it is damaged
        if metadata.items() <= load(file)[1].items():
            return []
    arpa = lm_text.arpa
    models = {} if arpa is None else _read_arpa_model(arpa, orders, tokenizer, word_table)
    messages = [f"language model of {name}: {arpa}" for name in models]
    num_left_out = 0

    def learned_texts() -> Iterator[str]:
        nonlocal num_left_out
        for text in filter(str.strip, texts()):
            if to_plain(text) in excluded:
                num_left_out += 1
            else:
                yield text

    sentences, num_sentences = draw_sentences(learned_texts(), max(MAX_TEXT_BYTES.values()))
    if held_out:
        count = plural(num_left_out, "sentence")
        left_out = f"{count} left out, because {' or '.join(held_out)} has the same"
        if not sentences and any(orders.values()):
            raise DataError(f"`lm_text` has no sentence to learn from ({left_out}). Name more.")
        messages.append(f"lm_text: {left_out}")
    words = Counter(chain.from_iterable(map(str.split, sentences)))
    spelling_notes = _check_spelling(words, tokenizer)
    to_words = _normalizer(word_table)
    splitters: dict[str, Callable[[str], list[str]]] = {
        WORDS: lambda text: to_words(text).split(),
        TOKENS: partial(_to_pieces, tokenizer=tokenizer),
    }
    for name, order in orders.items():
        if order and name not in models:
            drawn, _ = draw_sentences(sentences, MAX_TEXT_BYTES[name])
            logger.info(_describe_size(name, order, drawn, num_sentences))
            trained = train(map(splitters[name], drawn), order=order)
            models[name] = replace(trained.model, table=word_table if name == WORDS else None)
            messages.append(_describe(name, trained))
    if WORDS in models and models[WORDS].table is not None:
        messages.append("words of the language model: without case and punctuation")
    seen = draw_hashes(map(to_plain, sentences)) if models and arpa is None else None
    save(models, file, metadata=metadata, seen=seen)
    return messages + spelling_notes


def _normalizer(table: Orthography | None) -> Callable[[str], str]:
    return str if table is None else partial(normalize, language="", table=table)


def _plain_normalizer(table: Orthography | None) -> Callable[[str], str]:
    """Return what removes case and punctuation from normalized texts that keep them."""
    return _normalizer(None if table is None or table.is_plain else table.plain)


def replace_language_models(
    file: Path,
    lm_text: LmText,
    orders: Mapping[str, int],
    *,
    texts: Callable[[], Iterable[str]],
    table: Orthography,
    plain_words: bool,
    tokenizer: Tokenizer,
    held_out: Mapping[str, Iterable[str]],
) -> list[str]:
    """Train the language models of a file again on texts; return messages about them.

    ``orders``: only those that change. An ARPA file replaces only the model of its kind.
    The others: as for `ensure_language_models`.
    """
    models = load(file)[0] if file.exists() else {}
    current_orders = {name: model.order for name, model in models.items()}
    orders = {WORDS: 0, TOKENS: 0, **current_orders, **orders}
    file.unlink(missing_ok=True)
    if lm_text.arpa is not None:
        word_table = table.plain if plain_words and not table.is_plain else None
        models |= _read_arpa_model(lm_text.arpa, orders, tokenizer, word_table)
        models = {name: model for name, model in models.items() if orders[name]}
        save(models, file, metadata={"made_of": lm_text.source, "tokenizer": digest_of(tokenizer)})
        return [f"language model: {lm_text.arpa}"]
    return ensure_language_models(
        file,
        lm_text,
        orders,
        texts=texts,
        tokenizer=tokenizer,
        table=table,
        plain_words=plain_words,
        held_out=held_out,
    )


def write_language_model(
    out: Path, sentences: Iterable[str], *, order: int, tokenizer: Path | None
) -> str:
    """Train a language model, write it as an ARPA file, and return messages about it.

    sentences: normalized; tokenizer: for a model of tokens, a run, a bundle or the file of a
    tokenizer, None for a model of words.
    Raises SbkitError if a file cannot be read or written, the tokens do not spell the text, or the
    order is out of range.
    """
    require_writable(out.parent, option="--out")
    if tokenizer is None:
        trained = train(map(str.split, sentences), order=order)
        messages = [_describe(WORDS, trained)]
    else:
        file = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
        speller = Tokenizer(model_file=file)
        words = Counter[str]()

        def split_and_count() -> Iterator[list[str]]:
            for sentence in sentences:
                words.update(sentence.split())
                yield _to_pieces(sentence, speller)

        trained = train(split_and_count(), order=order)
        messages = [_describe(TOKENS, trained), *_check_spelling(words, speller)]
    write_arpa(trained.model, out)
    return "\n".join(messages)


def _to_pieces(text: str, tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of a text as pieces, without unknown ones."""
    unknown = tokenizer.vocabulary.unk
    return [tokenizer.piece(token) for token in tokenizer.encode(text) if token != unknown]


def _describe_size(name: str, order: int, drawn: Sequence[str], num_sentences: int) -> str:
    """Describe what a model will learn from, and what it takes."""
    megabytes = MEMORY_OF_BYTE[name] * sum(len(text.encode()) for text in drawn) / 1e6
    # With a space before the first token of BPE, and the end of the sentence
    num_tokens = sum((text.count(" ") if name == WORDS else len(text)) + 2 for text in drawn)
    all_sentences = f" drawn of {num_sentences:,}" if len(drawn) < num_sentences else ""
    return (
        f"language model of {name}: counting up to {order * num_tokens:,} n-grams in "
        f"{plural(len(drawn), 'sentence')}{all_sentences}, in up to "
        f"{math.ceil(megabytes):,} MB of memory"
    )


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

    Raises DataError if more than half of all letters are in no token: another language.
    """
    known_letters = {*"".join(tokenizer.texts)}
    num_letters = num_missing = num_unspelled = 0
    for word, count in words.items():
        missing = sum(letter not in known_letters for letter in word)
        num_letters += count * len(word)
        num_missing += count * missing
        num_unspelled += count * (missing > 0)
    share = num_unspelled / max(1, words.total())
    message = f"{share:.1%} of the text's words have letters that no token spells"
    if num_missing > MIN_SPELLED_SHARE * num_letters:
        raise DataError(
            f"The recognizer's tokens cannot spell this text: {message}. Train the language model "
            "on a text in the letters of the training transcripts."
        )
    return [message] if num_unspelled else []


# ---- ARPA files


def is_arpa(file: Path) -> bool:
    r"""Check whether a file is named like an ARPA file, or has its `\data\`.

    Raises DataError for a binary file of KenLM.
    """
    lines = [*islice(iter_raw_lines(file, subject=SUBJECT), MAX_PREAMBLE_LINES)]
    if lines and lines[0].startswith(KENLM_HEADER):
        raise DataError(
            f"{file} is a binary file of KenLM, which only KenLM reads. Name the ARPA file that it "
            "was made from.",
            where=str(file),
        )
    is_named = file.name.removesuffix(".gz").endswith(".arpa")
    return is_named or any(line.strip() == DATA_HEADER for line in lines)


def _read_arpa_model(
    file: Path, orders: Mapping[str, int], tokenizer: Tokenizer, word_table: Orthography | None
) -> dict[str, NgramModel]:
    """Read a model of words or of tokens; raise an error if its order or spelling does not fit.

    word_table: becomes the table of a model whose words have neither case nor punctuation.
    """
    model = read_arpa(file)
    words = model.words[len(SPECIAL) :]
    if any(SPACE in word for word in words):
        name = TOKENS
        num_spelled = len({*tokenizer.texts}.intersection(words))
    else:
        name = WORDS
        num_spelled = sum(tokenizer.letters(word) != "" for word in words)
    if model.order != orders[name]:
        option = f"{name[:-1]}_lm_order"
        raise ConfigError(
            f"{file} is a {model.order}-gram model of {name}, but `{option}` is {orders[name]}. "
            f"Set `{option}: {model.order}`."
        )
    if num_spelled <= MIN_SPELLED_SHARE * len(words):
        raise DataError(
            f"The recognizer's tokens spell only {num_spelled} of the {len(words)} {name} of "
            f"{file}. Train it on text that is normalized like the transcripts."
        )
    num_marked = sum(word != word.lower() or is_mark(word[-1]) for word in words)
    if name == WORDS and num_marked <= MAX_MARKED_SHARE * len(words):
        model = replace(model, table=word_table)
    return {name: model}
