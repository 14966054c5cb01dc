"""Check that weights are finite and fit a model, without importing SpeechBrain."""

from collections.abc import Container, Mapping
from typing import Any

import torch

from sbkit.base.errors import SbkitError
from sbkit.base.text import listed, plural


def check_finite(weights: Mapping[str, Any], *, of: str, parameters: Container[str] = ()) -> None:
    """Refuse tensors that hold NaN, and infinite ones among the ``parameters``.

    A buffer may be infinite: it may be a mask.
    Raises SbkitError.
    """
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            continue
        finite = value.isfinite() if name in parameters else ~value.isnan()
        if not bool(finite.all()):
            count = value.numel() - int(finite.sum())
            raise SbkitError(
                f"Weights must be finite, but {name} in {of} holds {count} of {value.numel()} that "
                f"{'is' if count == 1 else 'are'} not. Restore an earlier checkpoint, or train "
                "again with a lower `lr`."
            )


def check_same_model(saved: Mapping[str, Any], wanted: Mapping[str, Any], *, of: str) -> None:
    """Raise SbkitError for weights of another model; the first differences are named with sizes."""
    differences = [
        f"{key}: {size_in(saved, key)} saved, {size_in(wanted, key)} declared"
        for key in sorted({*saved, *wanted})
        if size_in(saved, key) != size_in(wanted, key)
    ]
    if differences:
        count = plural(len(differences), "tensor differs", "tensors differ")
        raise SbkitError(
            f"The weights in {of} must be those of the declared model, but {count} "
            f"({listed(differences, by='; ')}). Use the YAML they were trained with, or another "
            "folder."
        )


def size_in(tensors: Mapping[str, Any], key: str) -> str:
    """Write the size of a tensor, and its type unless it is one of floats; "none": not there."""
    if key not in tensors:
        return "none"
    value = tensors[key]
    size = "x".join(map(str, getattr(value, "shape", ()))) or "1"
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return size  # any of floats fits any other, and any of complex numbers
    kind = "complex" if value.is_complex() else str(value.dtype).removeprefix("torch.")
    return f"{size} {kind}"
