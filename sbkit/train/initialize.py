"""Start a run from the weights of another one: what fits by name and by shape is loaded.

Names are those of the YAML's parts, such as `CNN.conv1.weight`, so the other model may list its
parts in another order, have others, or another vocabulary. Only numbers are read: safetensors or
a state_dict, and a YAML or JSON as text; nothing of the other folder is built.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml.error import YAMLError
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.base.regular import read_regular
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.comparison import fault_of, size_in
from sbkit.checkpoint.declaration import CHECKPOINTS, RESOLVED
from sbkit.checkpoint.part_names import part_names_in, tensors_by_part, to_part_name
from sbkit.checkpoint.weights import average
from sbkit.config.document import read_document
from sbkit.config.judge import refuse_bomb
from sbkit.models.encoder_adapter import token_embedding
from sbkit.text.labels import ClassLabels
from sbkit.text.tokenizer import Tokenizer

BUNDLE_CONFIG, BUNDLE_WEIGHTS = "config.json", "model.safetensors"
LARGEST_CONFIG, LARGEST_WEIGHTS = 1 << 22, 1 << 36  # bytes
HEADS = ("ctc_lin", "seq_lin", "label_lin")
SHOWN = 4  # names in a line


@dataclass(frozen=True)
class Initialized:
    """What became of each tensor.

    loaded: taken from there; new: ours, but not there, of another shape or of other labels, with
    the reason; left: there, but not ours.
    """

    source: Path
    loaded: tuple[str, ...]
    new: tuple[str, ...]
    left: tuple[str, ...]

    def lines(self) -> list[str]:
        """Write it in three lines."""
        return [
            f"init_from {self.source}: {len(self.loaded)} tensors are loaded{_of(self.loaded)}",
            f"init_from: {len(self.new)} tensors are new{_of(self.new)}",
            f"init_from: {len(self.left)} tensors there are not used{_of(self.left)}",
        ]


def initialize_from(source: Path, hparams: Mapping[str, Any]) -> Initialized:
    """Load into the model what fits of a run's or a bundle's weights.

    Call it only where the run has no checkpoint of its own.
    Raises SbkitError when the folder is neither, or when nothing in it fits.
    """
    theirs, ours = read_named_weights(source), tensors_by_part(hparams)
    by_label = _by_label(hparams) if _has_other_labels(source, hparams) else frozenset[int]()
    loaded, new = [], []
    with torch.no_grad():
        for name, tensor in ours.items():
            others = "of other labels there" if id(tensor) in by_label else None
            fault = _fault(theirs, ours, name) or others
            if fault is None:
                tensor.copy_(theirs[name])
                loaded.append(name)
            else:
                new.append(f"{name} ({fault})")
    left = tuple(name for name in theirs if name not in ours)
    if not loaded:
        raise SbkitError(
            f"`init_from` must name a run or a bundle with parts of this model, but of the "
            f"{len(theirs)} tensors in {source} none fits by name and shape "
            f"({', '.join([*theirs][:SHOWN])}). Give the parts the names that they "
            "have there."
        )
    return Initialized(source, tuple(loaded), tuple(new), left)


def read_named_weights(source: Path) -> dict[str, Tensor]:
    """Read the weights of a bundle, or those that a run was tested with, by part and path.

    Raises SbkitError.
    """
    if (source / BUNDLE_WEIGHTS).is_file():
        weights, parts = _read_bundle(source)
    elif (source / CHECKPOINTS).is_dir():
        weights, parts = _read_run(source)
    else:
        raise SbkitError(
            f"`init_from` must name a run folder with {CHECKPOINTS}/ or a bundle with "
            f"{BUNDLE_WEIGHTS}, but {source} is neither. Name such a folder, or null to start from "
            "nothing."
        )
    return {to_part_name(name, parts): each for name, each in weights.items()}


def _by_label(hparams: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids of the tensors that have a row for each token or class."""
    modules = [hparams.get(name) for name in HEADS] + [token_embedding(hparams.get("Transformer"))]
    return frozenset(
        id(each) for part in modules if isinstance(part, nn.Module) for each in part.parameters()
    )


def _has_other_labels(source: Path, hparams: Mapping[str, Any]) -> bool:
    """Return whether the rows of a head stand for something else there, as far as it is known."""
    tokenizer, labels = hparams.get("tokenizer"), hparams.get("labels")
    if isinstance(tokenizer, Tokenizer):
        file = source / tokenizer.model_file.name
        return file.is_file() and Tokenizer(model_file=file).pieces() != tokenizer.pieces()
    if isinstance(labels, ClassLabels):
        file = source / labels.file.name
        if file.is_file():
            return ClassLabels(file=file).names != labels.names
        if (source / BUNDLE_CONFIG).is_file():
            return _read_config(source).get("labels") != labels.names
    return False


def _read_config(source: Path) -> dict[str, Any]:
    config = json.loads(_read(source / BUNDLE_CONFIG, LARGEST_CONFIG))
    if not isinstance(config, dict):
        raise TypeError(f"{BUNDLE_CONFIG} is no mapping")
    return config


def _read_bundle(source: Path) -> tuple[dict[str, Tensor], list[str]]:
    try:
        parts = _read_config(source)["model"]
        if not isinstance(parts, list) or not all(isinstance(each, str) for each in parts):
            raise TypeError("`model` is no list of names")
        return load_safetensors(_read(source / BUNDLE_WEIGHTS, LARGEST_WEIGHTS)), parts
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise _unreadable(source, error) from error


def _read_run(source: Path) -> tuple[dict[str, Tensor], list[str]]:
    refuse_bomb(source / RESOLVED)
    try:
        parts = part_names_in(read_document(source / RESOLVED).root)
    except (YAMLError, RecursionError) as error:
        raise _unreadable(source, error) from error
    checkpointer = Checkpointer(source / CHECKPOINTS)
    best = checkpointer.find_averaged() or checkpointer.find_whole(1)
    if not best:
        raise SbkitError(
            f"`init_from` must name a run with a whole checkpoint, but {source} has none. Train it "
            "first, or name another."
        )
    return average(best, "model"), parts


def _read(file: Path, largest: int) -> bytes:
    return read_regular(file, largest=largest, what=f"A bundle's {file.name}")


def _unreadable(source: Path, error: Exception) -> SbkitError:
    why = str(error).splitlines()[0] if str(error) else "empty"
    return SbkitError(
        f"`init_from` must name a run folder or a bundle, but {source} cannot be read "
        f"({type(error).__name__}: {why}). Name "
        "another, or null to start from nothing."
    )


def _fault(theirs: Mapping[str, Any], ours: Mapping[str, Tensor], name: str) -> str | None:
    there, here = size_in(theirs, name), size_in(ours, name)
    if there != here:
        return f"{there} there, {here} here"
    return fault_of(theirs[name], ours[name])


def _of(names: tuple[str, ...]) -> str:
    if not names:
        return "."
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f": {', '.join(names[:SHOWN])}{more}."
