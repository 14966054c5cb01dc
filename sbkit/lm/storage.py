"""Store language models in one safetensors file, with the origin of their text.

Each model has a name, such as ``words``; its arrays are ``NAME.keys_2``, ``NAME.log_probs_1`` and
so on, and its words are one text. Loading runs no code, and takes no more memory than the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from sbkit.base.errors import DataError
from sbkit.base.files import read_regular, write_bytes_atomically
from sbkit.lm.ngram import SPECIAL, Grams, NgramModel

MAX_FILE_BYTES = 1 << 33
FIELDS = ("keys", "log_probs", "backoffs")
Arrays = Mapping[str, np.ndarray[Any, Any]]


def save(models: Mapping[str, NgramModel], file: Path, *, metadata: Mapping[str, str]) -> None:
    """Write models and their metadata."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, model in models.items():
        arrays[f"{name}.words"] = np.frombuffer("\n".join(model.words).encode(), np.uint8)
        for order, grams in enumerate(model.grams, start=1):
            arrays |= {
                f"{name}.{field}_{order}": np.ascontiguousarray(getattr(grams, field))
                for field in FIELDS
            }
    orders = {name: model.order for name, model in models.items()}
    content = safetensors.numpy.save(arrays, metadata={"orders": json.dumps(orders), **metadata})
    write_bytes_atomically(file, _sort_metadata(content))


def _sort_metadata(content: bytes) -> bytes:
    """Sort the metadata, whose order safetensors does not fix: equal runs must give equal files."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def load(file: Path) -> tuple[dict[str, NgramModel], dict[str, str]]:
    """Read models and their metadata; raise DataError if the file is damaged or of another kind."""
    content = read_regular(file, max_bytes=MAX_FILE_BYTES, subject="A file of language models")
    return parse(content, of=file)


def parse(content: bytes, *, of: Path) -> tuple[dict[str, NgramModel], dict[str, str]]:
    """Read models from the bytes of a file; ``of`` names it in an error."""
    try:
        arrays = safetensors.numpy.load(content)
        length = int.from_bytes(content[:8], "little")  # of the header
        metadata: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
        orders = json.loads(metadata["orders"])
        return {name: _make_model(arrays, name, orders[name]) for name in orders}, metadata
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(
            f"{of} is not a file of language models, or is damaged ({type(error).__name__}: "
            f"{error}). Train them again."
        ) from error


def _make_model(arrays: Arrays, name: str, order: int) -> NgramModel:
    words = tuple(arrays[f"{name}.words"].tobytes().decode().split("\n"))
    grams = [
        Grams(*(arrays[f"{name}.{field}_{n}"] for field in FIELDS)) for n in range(1, order + 1)
    ]
    if words[: len(SPECIAL)] != SPECIAL or len(grams[0]) != len(words):
        raise ValueError(f"the words of {name} are not those of its unigrams")
    num_contexts = 1
    for n, one in enumerate(grams, start=1):
        if not _is_valid(one, num_contexts * len(words)):
            raise ValueError(f"the {n}-grams of {name} are damaged")
        num_contexts = len(one)
    return NgramModel(words, tuple(grams))


def _is_valid(grams: Grams, size: int) -> bool:
    """Check that keys increase from 0 to below ``size``, and that log-probabilities are valid."""
    keys, values = grams.keys, (grams.log_probs, grams.backoffs)
    return bool(
        keys.dtype == np.int64
        and keys.ndim == 1
        and all(one.dtype == np.float32 and one.shape == keys.shape for one in values)
        and (np.diff(keys, prepend=-1, append=size) > 0).all()
        and np.isfinite(values).all()
        and (grams.log_probs <= 0).all()
    )
