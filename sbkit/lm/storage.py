"""Language models in one safetensors file, with what they were made of.

Each model has a name, such as ``words``; its arrays are ``NAME.keys.2``, ``NAME.log_probs.1`` and
so on, and its words are one text. Loading runs nothing, and takes no more memory than the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from sbkit.base.errors import SbkitError
from sbkit.base.files import write_bytes_atomically
from sbkit.base.printable import printable
from sbkit.base.regular import read_regular
from sbkit.lm.kneser_ney import HIGHEST_ORDER
from sbkit.lm.ngram import SPECIAL, NgramModel

FORMAT = 1
LARGEST_MODEL = 1 << 33  # bytes
Arrays = Mapping[str, npt.NDArray[Any]]


def save(models: Mapping[str, NgramModel], file: Path, *, metadata: Mapping[str, str]) -> None:
    """Write models, and what says where they come from."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, model in models.items():
        text = "\n".join(model.words).encode()
        arrays[f"{name}.words"] = np.frombuffer(text, np.uint8)
        arrays |= {f"{name}.keys.{n}": each for n, each in enumerate(model.keys, start=2)}
        arrays |= {f"{name}.log_probs.{n}": each for n, each in enumerate(model.log_probs, start=1)}
        arrays |= {f"{name}.backoffs.{n}": each for n, each in enumerate(model.backoffs, start=1)}
    orders = {name: model.order for name, model in models.items()}
    about = {"format": str(FORMAT), "orders": json.dumps(orders), **metadata}
    write_bytes_atomically(file, safetensors.numpy.save(arrays, metadata=about))


def load(file: Path) -> tuple[dict[str, NgramModel], dict[str, str]]:
    """Read models and what is said of them.

    Raises:
        SbkitError: it is no file of language models, or one that is damaged.
    """
    content = read_regular(file, largest=LARGEST_MODEL, what="A file of language models")
    return parse(content, of=file)


def parse(content: bytes, *, of: Path) -> tuple[dict[str, NgramModel], dict[str, str]]:
    """Read models from the bytes of a file; ``of`` names it in a refusal."""
    try:
        size = int.from_bytes(content[:8], "little")
        about = json.loads(content[8 : 8 + size]).get("__metadata__", {})
        arrays = safetensors.numpy.load(content)
        orders = json.loads(about["orders"])
        models = {name: _model(arrays, name, order) for name, order in orders.items()}
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise SbkitError(
            f"{of} must be a file of language models, but cannot be read as one "
            f"({printable(str(error))[:200]}). Train them again."
        ) from error
    return models, about


def _model(arrays: Arrays, name: str, order: Any) -> NgramModel:
    """Make a model of its arrays; raises ValueError for what a decoder cannot use."""
    if type(order) is not int or not 1 <= order <= HIGHEST_ORDER:
        raise ValueError(f"its order is {order!r}")
    words = tuple(bytes(arrays[f"{name}.words"]).decode().split("\n"))
    keys = tuple(arrays[f"{name}.keys.{n}"] for n in range(2, order + 1))
    log_probs = tuple(arrays[f"{name}.log_probs.{n}"] for n in range(1, order + 1))
    backoffs = tuple(arrays[f"{name}.backoffs.{n}"] for n in range(1, order))
    if words[: len(SPECIAL)] != SPECIAL or len(set(words)) < len(words):
        raise ValueError("its words do not begin with those of every model, or are there twice")
    counts = [len(words), *(each.size for each in keys)]
    if [each.size for each in log_probs] != counts or [each.size for each in backoffs] != counts[
        :-1
    ]:
        raise ValueError("its arrays have different lengths")
    for below, each in zip(counts, keys, strict=False):
        if each.dtype != np.int64 or each.ndim != 1 or (np.diff(each) <= 0).any():
            raise ValueError("its n-grams are not sorted")
        if each.size and not 0 <= each[0] <= each[-1] < below * len(words):
            raise ValueError("its n-grams are of words that are not there")
    for each in (*log_probs, *backoffs):
        if each.dtype != np.float32 or each.ndim != 1 or not np.isfinite(each).all():
            raise ValueError("a probability is no finite number")
    if any((each > 1e-4).any() for each in log_probs):
        raise ValueError("a probability is larger than one")
    return NgramModel(words, keys, log_probs, backoffs)
