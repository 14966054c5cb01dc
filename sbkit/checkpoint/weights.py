"""The weights in checkpoints: read, compared with a model's, and averaged."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.checkpoints import (
    DEFAULT_LOAD_HOOKS,
    Checkpoint,
    Checkpointer,
    get_default_hook,
    hook_on_loading_state_dict_checkpoint,
    torch_recovery,
)
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.base.printable import printable
from sbkit.checkpoint.integrity import reading

SHOWN = 3  # tensors that differ


def modules_of(checkpointer: Checkpointer) -> dict[str, nn.Module]:
    """Name the modules whose file is a state_dict; others have savers of their own."""
    own = {**checkpointer.custom_load_hooks, **checkpointer.custom_save_hooks}
    return {
        name: each
        for name, each in checkpointer.recoverables.items()
        if isinstance(each, nn.Module)
        and name not in own
        and get_default_hook(each, DEFAULT_LOAD_HOOKS) is torch_recovery
    }


def read_weights(file: Path) -> dict[str, Any]:
    """Read a state_dict onto the CPU, by the names that SpeechBrain now has for its tensors.

    Raises SbkitError when the file holds something else, tensors without numbers, or NaN.
    """
    with reading(file):
        weights = torch.load(file, "cpu", weights_only=True)
        if not isinstance(weights, Mapping):
            raise ValueError(f"it holds a {type(weights).__name__}")
        refuse_unusable(weights, of=str(file))
        return dict(hook_on_loading_state_dict_checkpoint(weights))


def average(checkpoints: Sequence[Checkpoint], name: str) -> dict[str, Any]:
    """Average the weights of a module over checkpoints; whole numbers are the first one's.

    One after the other in float64, so memory holds two models however many there are.
    Raises SbkitError when they are not all of one model.
    """
    first, *others = (_file_of(checkpoint, name) for checkpoint in checkpoints)
    mean = read_weights(first)
    types = {
        key: value.dtype
        for key, value in mean.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    for key in types:
        mean[key] = mean[key].double()
    for file in others:
        weights = read_weights(file)
        refuse_other_model(weights, mean, of=str(file))
        for key in types:
            mean[key] += weights[key]
    return mean | {key: (mean[key] / len(checkpoints)).to(types[key]) for key in types}


def refuse_unusable(
    weights: Mapping[str, Any], *, of: str, parameters: Container[str] = ()
) -> None:
    """Refuse tensors that hold no numbers or NaN, and infinite ones among the ``parameters``.

    A buffer may be infinite: it may be a mask.
    Raises SbkitError.
    """
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = "on the meta device" if value.is_meta else f"of layout {value.layout}"
            raise SbkitError(
                f"Weights must be plain tensors, but {printable(name)} in {of} is {kind}. Restore "
                "an earlier checkpoint."
            )
        finite = value.isfinite() if name in parameters else ~value.isnan()
        if not bool(finite.all()):
            count = value.numel() - int(finite.sum())
            raise SbkitError(
                f"Weights must be finite, but {printable(name)} in {of} holds {count} of "
                f"{value.numel()} that {'is' if count == 1 else 'are'} not. Restore an earlier "
                "checkpoint, or train again with a lower `lr`."
            )


def refuse_other_model(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, of: str) -> None:
    """Refuse weights of another model, or ones that cannot be computed with.

    The first differences are named with their sizes. ``wanted`` may be on the meta device.
    Raises SbkitError.
    """
    differences = [
        f"{key}: {_size(saved, key)} saved, {_size(wanted, key)} declared"
        for key in sorted({*saved, *wanted})
        if _size(saved, key) != _size(wanted, key)
    ]
    if differences:
        shown = printable("; ".join(differences[:SHOWN]))
        count = (
            "1 tensor differs" if len(differences) == 1 else f"{len(differences)} tensors differ"
        )
        raise SbkitError(
            f"The weights in {of} must be those of the declared model, but {count} "
            f"({shown}). Use the YAML they were trained with, or another folder."
        )
    unfit = [f"{key} {fault}" for key in wanted if (fault := _fault(saved[key], wanted[key]))]
    if unfit:
        shown = "; ".join(unfit[:SHOWN])
        raise SbkitError(
            f"The weights in {of} must be finite numbers of the declared types, but "
            f"{len(unfit)} of {len(saved)} tensors are not ({shown}). Restore them, or go on from "
            "an earlier checkpoint."
        )


def _fault(saved: Any, wanted: Any) -> str | None:
    """Return why a saved tensor cannot stand for a model's; None when it can.

    A buffer that is declared with infinite values, such as a mask, may have them.
    """
    if not isinstance(wanted, torch.Tensor):
        return None
    if not isinstance(saved, torch.Tensor) or saved.layout is not torch.strided or saved.is_meta:
        return "is no plain tensor"
    if _kind(saved) != _kind(wanted):
        return f"is of {saved.dtype} instead of {wanted.dtype}"
    if saved.isfinite().all() or not (wanted.is_meta or wanted.isfinite().all()):
        return None
    return "holds numbers that are not finite"


def _kind(tensor: torch.Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "real" if tensor.is_floating_point() else "whole"


def _file_of(checkpoint: Checkpoint, name: str) -> Path:
    if name not in checkpoint.paramfiles:
        raise SbkitError(
            f"A checkpoint must hold the weights of `{name}`, but {checkpoint.path} does not. Name "
            "the recoverable as it was named in training."
        )
    file: Path = checkpoint.paramfiles[name]
    return file


def _size(tensors: Mapping[str, Any], key: str) -> str:
    if key not in tensors:
        return "none"
    value = tensors[key]
    size = "x".join(map(str, getattr(value, "shape", ()))) or "1"
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return size
    return f"{size} {str(value.dtype).removeprefix('torch.')}"  # any of floats fits any other
