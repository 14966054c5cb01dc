"""Language models of words and of tokens, in one file.

The file is safetensors. Each model has a name, `words` or `tokens`; its arrays are `NAME.keys_2`,
`NAME.log_probs_1` and so on, and its words are one text. `seen` has hashes of the sentences that
the models were trained on; a model from an ARPA file has none.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from sbkit.base.arrays import Array
from sbkit.base.errors import BundleError
from sbkit.base.files import read_regular, write_bytes_atomically
from sbkit.lm.ngram import SPECIAL, Grams, NgramModel
from sbkit.text.normalization import TextTable, normalize, table_from_stored, table_to_store
from sbkit.text.tokenizer import Tokenizer

WORDS, TOKENS = "words", "tokens"
LM_VERSION = 1  # raised with each change of trained models
MAX_MODELS_BYTES = 1 << 33
FIELDS = ("keys", "log_probs", "backoffs")
WORD_TABLE = "word_table"  # in the metadata: `NgramModel.table` of the model of words
SEEN_HASHES = "seen"  # the array of `hash_sentences`
SEEN = "seen_by_language_model"  # in the figures of a test set: what `count_seen` returns


@dataclass(frozen=True)
class LanguageModels:
    """The language models of a decoder, of words and of tokens; None for no model.

    seen: hashes of the sentences that the models were trained on; None if unknown.
    """

    words: NgramModel | None
    tokens: NgramModel | None
    seen: Array | None = None

    def count_seen(self, texts: Iterable[str], table: TextTable) -> dict[str, Any]:
        """Count, under SEEN, the normalized texts of a test set that occur in the training text."""
        if self.seen is None:
            return {}
        hashes = hash_sentences(filter(None, (plain_text(text, table) for text in texts)))
        return {SEEN: {"seen": int(np.isin(hashes, self.seen).sum()), "of": len(hashes)}}


def plain_text(text: str, table: TextTable | None) -> str:
    """Drop case and punctuation from a text that a table has normalized."""
    return text if table is None or table.is_plain else normalize(text, "", table.plain)


def hash_sentences(sentences: Iterable[str]) -> Array:
    """Return the hash of each sentence: (N,) of uint64."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in sentences)
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def describe_seen(counts: Mapping[str, Any]) -> str:
    """Write the figure SEEN in one line."""
    seen, total = counts["seen"], counts["of"]
    share = 100 * seen / max(total, 1)
    return f"The language model has seen {seen} of {total} test sentences ({share:.1f} %)"


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
    """Read models, metadata and the hashes of sentences, from ``content`` if known."""
    if content is None:
        subject = "A file of language models"
        content = read_regular(file, max_bytes=MAX_MODELS_BYTES, subject=subject)
    try:
        arrays = safetensors.numpy.load(content)
        length = int.from_bytes(content[:8], "little")  # of the header
        metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
        orders = json.loads(metadata["orders"])
        if not isinstance(orders, dict):
            raise ValueError(f"its orders are {orders!r}")
        models = {name: _make_model(arrays, name, orders[name]) for name in orders}
        if WORD_TABLE in metadata:
            table = table_from_stored(json.loads(metadata[WORD_TABLE]))
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
            # Keys increase from 0, and stay below the number of contexts times the number of words.
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

    Raises BundleError if the file is damaged or belongs to another tokenizer.
    """
    models, metadata, seen = load(file, content)
    digest = metadata.get("tokenizer")
    if digest != tokenizer_digest(tokenizer):
        raise BundleError(
            f"The language models in {file} belong to another tokenizer. Train them again."
        )
    return LanguageModels(models.get(WORDS), models.get(TOKENS), seen)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer."""
    return hashlib.sha256(tokenizer.content).hexdigest()
