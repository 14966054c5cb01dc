"""Store language models in one safetensors file, with the origin of their text.

Each model has a name, such as ``words``; its arrays are ``NAME.keys_2``, ``NAME.log_probs_1`` and
so on, and its words are one text. Loading runs nothing, and takes no more memory than the file.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_regular, write_bytes_atomically
from sbkit.lm.ngram import BLANKS, LARGEST_ORDER, SPECIAL, Grams, NgramModel

LARGEST_FILE = 1 << 33  # bytes
TYPES = {"keys": np.int64, "log_probs": np.float32, "backoffs": np.float32}
Arrays = Mapping[str, np.ndarray[Any, Any]]


class UnfitError(Exception):
    """Two halves of an error: what must hold of a file, and what came."""


def save(models: Mapping[str, NgramModel], file: Path, *, metadata: Mapping[str, str]) -> None:
    """Write models and their metadata."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, model in models.items():
        arrays[f"{name}.words"] = np.frombuffer("\n".join(model.words).encode(), np.uint8)
        for order, grams in enumerate(model.grams, start=1):
            arrays |= {
                f"{name}.{field}_{order}": np.ascontiguousarray(getattr(grams, field))
                for field in TYPES
            }
    orders = {name: model.order for name, model in models.items()}
    about = {"orders": json.dumps(orders), **metadata}
    write_bytes_atomically(file, safetensors.numpy.save(arrays, metadata=about))


def load(file: Path) -> tuple[dict[str, NgramModel], dict[str, str]]:
    """Read models and their metadata.

    Raises SbkitError where it is no file of language models, or its parts do not fit together.
    """
    content = read_regular(file, largest=LARGEST_FILE, what="A file of language models")
    return parse(content, of=file)


def parse(content: bytes, *, of: Path) -> tuple[dict[str, NgramModel], dict[str, str]]:
    """Read models from the bytes of a file; ``of`` names it in a refusal."""
    try:
        arrays = safetensors.numpy.load(content)
        about = _read_about(content)
        orders = dict(json.loads(about["orders"]))
        names = {name.partition(".")[0] for name in arrays}
        if names != orders.keys():
            raise UnfitError("hold the models that it names", "holds others")
        models = {name: _make_model(arrays, name, order) for name, order in orders.items()}
    except UnfitError as error:
        must, but = error.args
        raise SbkitError(
            f"A file of language models must {must}, but {of} {but}. Train them again."
        ) from None
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SbkitError(
            f"A file of language models must be one of sbkit, but {of} cannot be read "
            f"({type(error).__name__}). Train them again."
        ) from error
    return models, about


def _read_about(content: bytes) -> dict[str, str]:
    """Read the metadata in the header, which safetensors has parsed before and so is sound."""
    length = int.from_bytes(content[:8], "little")
    about: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return about


def _make_model(arrays: Arrays, name: str, order: object) -> NgramModel:
    if not isinstance(order, int) or not 1 <= order <= LARGEST_ORDER:
        raise UnfitError(f"have orders from 1 to {LARGEST_ORDER}", f"has {str(order)[:20]}")
    types: dict[str, Any] = {
        f"{name}.{field}_{n}": kind for n in range(1, order + 1) for field, kind in TYPES.items()
    }
    types[f"{name}.words"] = np.uint8
    if {each for each in arrays if each.startswith(f"{name}.")} != types.keys():
        raise UnfitError("hold the arrays of its orders, and the words", "holds others")
    for each, kind in types.items():
        if arrays[each].dtype != kind or arrays[each].ndim != 1:
            found = f"{arrays[each].ndim} of {arrays[each].dtype}"
            raise UnfitError(f"have one dimension of {np.dtype(kind)} in {each}", f"has {found}")
    words = _read_words(arrays[f"{name}.words"].tobytes())
    grams = list[Grams]()
    for n in range(1, order + 1):
        each_order = Grams(*(arrays[f"{name}.{field}_{n}"] for field in TYPES))
        _check_grams(each_order, n, contexts=len(grams[-1]) if grams else 1, size=len(words))
        grams.append(each_order)
    return NgramModel(words, tuple(grams))


def _read_words(content: bytes) -> tuple[str, ...]:
    try:
        words = tuple(content.decode().split("\n"))
    except UnicodeDecodeError:
        raise UnfitError("have words in UTF-8", "has others") from None
    if words[: len(SPECIAL)] != SPECIAL:
        raise UnfitError(f"begin its words with {' '.join(SPECIAL)}", "does not")
    own = words[len(SPECIAL) :]
    if any(one >= other for one, other in pairwise(own)):
        raise UnfitError("list each word once, and in order", "does not")
    if not set(own).isdisjoint((*SPECIAL, "")) or not BLANKS.isdisjoint("".join(words)):
        raise UnfitError("have words of characters, none of them white space", "has others")
    return words


def _check_grams(grams: Grams, order: int, *, contexts: int, size: int) -> None:
    """Check the n-grams of one order; contexts counts those of the order below."""
    keys = grams.keys
    if not len(keys) == len(grams.log_probs) == len(grams.backoffs):
        raise UnfitError(f"have as many keys as values of order {order}", "has not")
    if order == 1 and len(keys) != size:
        raise UnfitError(f"have as many unigrams as words ({size})", f"has {len(keys)}")
    if len(keys) and (keys[0] < 0 or keys[-1] >= contexts * size):
        raise UnfitError(
            f"have keys from 0 to {contexts * size - 1} in order {order}", "has others"
        )
    if not (keys[1:] > keys[:-1]).all():
        raise UnfitError(f"have its keys of order {order} sorted, each once", "has not")
    if not (np.isfinite(grams.log_probs).all() and np.isfinite(grams.backoffs).all()):
        raise UnfitError(f"hold finite numbers in order {order}", "does not")
    if not (grams.log_probs <= 0).all():
        raise UnfitError(f"have log-probabilities of at most 0 in order {order}", "has others")
