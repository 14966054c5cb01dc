"""Check that weights are finite and fit a model, without importing SpeechBrain."""

import threading
from collections.abc import Container, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from sbkit.base.errors import SbkitError
from sbkit.base.text import listed, plural

PARTS_WITHOUT_WEIGHTS = 1 << 24  # parameters at most, of parts that the file has nothing for


def limit_parameters(weights: Mapping[str, torch.Tensor]) -> AbstractContextManager[object]:
    """Refuse, in this thread and in a `with` statement, modules far larger than their weights.

    They are refused before their memory is written to: a file of a megabyte may come with the
    description of a model that fills the machine.
    Raises SbkitError.
    """
    # A parameter is registered again where it is parametrized, as that of a weight norm is.
    left = 2 * sum(value.numel() for value in weights.values()) + PARTS_WITHOUT_WEIGHTS
    thread = threading.get_ident()

    def count(_: object, name: str, parameter: torch.nn.Parameter) -> None:
        nonlocal left
        left -= parameter.numel() if threading.get_ident() == thread else 0
        if left < 0:
            raise SbkitError(
                "The parts of a model must be as large as its weights, but at one of its "
                f"parameters, `{name}`, they are more than twice as large. Export it again."
            )

    return register_module_parameter_registration_hook(count)


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
