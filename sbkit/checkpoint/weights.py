"""What checkpoints hold: weights, read and averaged, and the state of optimizers.

Check that weights are finite and fit a model, without importing SpeechBrain.

Names of tensors by the YAML's parts: `CNN.conv1.weight` for a checkpoint's `0.conv1.weight`.

A checkpoint of a torch.nn.ModuleList numbers its modules. Another YAML may list other parts in
another order, so what is compared between runs goes by the key under which a part is declared.
"""

import threading
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml.comments import CommentedMap
from speechbrain.utils.checkpoints import (
    DEFAULT_LOAD_HOOKS,
    Checkpoint,
    Checkpointer,
    get_default_hook,
    hook_on_loading_state_dict_checkpoint,
    torch_recovery,
)
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from sbkit.base.checksums import SAVED
from sbkit.base.errors import SbkitError
from sbkit.base.files import reading
from sbkit.base.messages import listed, plural

# What schedules write into the groups, SpeechBrain's and torch's: they go on from what they wrote.
SCHEDULED = {"lr", "initial_lr", "prev_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
CYCLED = {"momentum", "betas"}  # by schedules that leave a `base_momentum`

Groups = Sequence[Mapping[str, Any]]


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
    fix = f"Restore it, or move {file.parent} away to go on from the one before."
    with reading(file, must=SAVED, fix=fix):
        weights = torch.load(file, "cpu", weights_only=True)
        if not isinstance(weights, Mapping):
            raise ValueError(f"it holds a {type(weights).__name__}")
        check_finite(weights, of=str(file))
        return dict(hook_on_loading_state_dict_checkpoint(weights))


def check_weights(checkpointer: Checkpointer, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose weights are not those of the modules; raises SbkitError."""
    for name, module in modules_of(checkpointer).items():
        if name in checkpoint.paramfiles:
            saved = read_weights(checkpoint.paramfiles[name])
            check_same_model(saved, module.state_dict(), of=str(checkpoint.path))


def average(checkpoints: Sequence[Checkpoint], name: str) -> dict[str, Any]:
    """Average the weights of a module over checkpoints; whole numbers are the first one's.

    One after the other in float64, so memory holds two models however many there are.
    Raises SbkitError when they are not all of one model.
    """
    first, *others = (checkpoint.paramfiles[name] for checkpoint in checkpoints)
    mean = read_weights(first)
    types = {
        key: value.dtype
        for key, value in mean.items()
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    }
    for key, dtype in types.items():
        mean[key] = mean[key].to(torch.promote_types(dtype, torch.float64))
    for file in others:
        weights = read_weights(file)
        check_same_model(weights, mean, of=str(file))
        for key in types:
            mean[key] += weights[key]
    return mean | {key: (mean[key] / len(checkpoints)).to(types[key]) for key in types}


def restore_declared(optimizer: Optimizer, declared: Groups, *, of: Path) -> None:
    """Set the declared hyperparameters of an optimizer that was loaded, but for scheduled ones.

    Raises SbkitError where the loaded state is that of another class of optimizers.
    """
    for group, own in zip(optimizer.param_groups, declared, strict=True):
        gone, new = group.keys() - own.keys() - SCHEDULED, own.keys() - group.keys()
        if gone and new:  # either alone may come with another torch
            raise SbkitError(
                f"The optimizer in {of} must be the declared one, but was saved with "
                f"{listed(sorted(gone))}, and is declared with {listed(sorted(new))}. Use the YAML "
                "that it was trained with, or another output_folder."
            )
        kept = {"params", *SCHEDULED, *(CYCLED if "base_momentum" in group else ())}
        group.update({name: value for name, value in own.items() if name not in kept})


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
            f"({listed(differences, separator='; ')}). Use the YAML they were trained with, or "
            "another folder."
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


def part_names(hparams: Mapping[str, Any]) -> list[str]:
    """Name the parts of the ModuleList in its order; one that is no key keeps its number."""
    owned = hparams.get("model")
    if not isinstance(owned, nn.ModuleList):
        return []
    keys = {id(value): key for key, value in hparams.items() if isinstance(value, nn.Module)}
    return [keys.get(id(module), str(number)) for number, module in enumerate(owned)]


def part_names_in(root: CommentedMap) -> list[str]:
    """Name the parts likewise from a resolved YAML, in which an alias is the node itself."""
    keys = {id(node): str(key) for key, node in root.items()}
    arguments = root.get("model")  # by place, or as `modules`
    is_map = isinstance(arguments, CommentedMap)
    listed = arguments.get("modules") if is_map else arguments and arguments[0]
    return [keys.get(id(node), str(number)) for number, node in enumerate(listed or ())]


def to_part_name(name: str, parts: Sequence[str]) -> str:
    """Turn `0.conv1.weight` into `CNN.conv1.weight`."""
    number, _, rest = name.partition(".")
    if not number.isdecimal() or int(number) >= len(parts):
        return name
    return f"{parts[int(number)]}.{rest}"


def tensors_by_part(hparams: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's own tensors, parameters and buffers, by part and path."""
    owned = hparams.get("model")
    if not isinstance(owned, nn.Module):
        return {}
    parts = part_names(hparams)
    tensors = owned.state_dict(keep_vars=True)
    return {to_part_name(name, parts): each for name, each in tensors.items()}
