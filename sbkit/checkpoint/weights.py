"""What checkpoints hold: weights, read and averaged, and the state of optimizers.

A checkpoint of a torch.nn.ModuleList numbers its modules. Another YAML may list other parts in
another order, so weights are compared between runs by the key under which a part is declared:
`CNN.conv1.weight` for a checkpoint's `0.conv1.weight`.
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

from sbkit.base.checksums import CHECKPOINT_CONTENT
from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import reading
from sbkit.base.messages import listed, plural

# Written into the groups by schedules, SpeechBrain's and torch's, which resume from them
SCHEDULED_NAMES = {
    "lr",
    "initial_lr",
    "prev_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
}
CYCLED_NAMES = {"momentum", "betas"}  # written by schedules that leave a `base_momentum`

Groups = Sequence[Mapping[str, Any]]


def modules_of(checkpointer: Checkpointer) -> dict[str, nn.Module]:
    """Name the modules whose file is a state_dict; others have their own savers."""
    custom = {**checkpointer.custom_load_hooks, **checkpointer.custom_save_hooks}
    return {
        name: recoverable
        for name, recoverable in checkpointer.recoverables.items()
        if isinstance(recoverable, nn.Module)
        and name not in custom
        and get_default_hook(recoverable, DEFAULT_LOAD_HOOKS) is torch_recovery
    }


def read_weights(file: Path) -> dict[str, Any]:
    """Read a state_dict onto the CPU, under the names of this version of SpeechBrain.

    Raises SbkitError for anything else, or for tensors that hold NaN.
    """
    fix = f"Restore it, or move {file.parent} away to resume from the one before."
    with reading(file, CHECKPOINT_CONTENT, fix=fix):
        weights = torch.load(file, "cpu", weights_only=True)
        if not isinstance(weights, Mapping):
            raise ValueError(f"it holds a {type(weights).__name__}")
        check_finite(weights, of=str(file))
        return dict(hook_on_loading_state_dict_checkpoint(weights))


def check_weights(checkpointer: Checkpointer, checkpoint: Checkpoint) -> None:
    """Raise BundleError for a checkpoint whose weights do not fit the modules."""
    for name, module in modules_of(checkpointer).items():
        if name in checkpoint.paramfiles:
            saved = read_weights(checkpoint.paramfiles[name])
            check_same_model(saved, module.state_dict(), of=str(checkpoint.path))


def average(checkpoints: Sequence[Checkpoint], name: str) -> dict[str, Any]:
    """Average the weights of a module over checkpoints; integers are taken from the first.

    Checkpoints are added one by one in float64, so memory holds two models however many there are.
    Raises BundleError when they do not all belong to one model.
    """
    first, *later = (checkpoint.paramfiles[name] for checkpoint in checkpoints)
    mean = read_weights(first)
    types = {
        key: value.dtype
        for key, value in mean.items()
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    }
    for key, dtype in types.items():
        mean[key] = mean[key].to(torch.promote_types(dtype, torch.float64))
    for file in later:
        weights = read_weights(file)
        check_same_model(weights, mean, of=str(file))
        for key in types:
            mean[key] += weights[key]
    return mean | {key: (mean[key] / len(checkpoints)).to(types[key]) for key in types}


def restore_declared(optimizer: Optimizer, declared: Groups, *, of: Path) -> None:
    """Set the declared hyperparameters of a loaded optimizer, except for scheduled ones.

    Raises ConfigError if the loaded state comes from another class of optimizers.
    """
    for group, own in zip(optimizer.param_groups, declared, strict=True):
        removed, added = group.keys() - own.keys() - SCHEDULED_NAMES, own.keys() - group.keys()
        if removed and added:  # another version of torch may cause one of the two, but not both
            raise ConfigError(
                f"The optimizer in {of} was saved with {listed(sorted(removed))}, but is declared "
                f"with {listed(sorted(added))}. Use the YAML that it was trained with, or another "
                "--output_folder."
            )
        loaded = {"params", *SCHEDULED_NAMES, *(CYCLED_NAMES if "base_momentum" in group else ())}
        group.update({name: value for name, value in own.items() if name not in loaded})


MAX_UNSAVED_PARAMETERS = 1 << 24  # of parts for which the file has no weights


def limit_parameters(weights: Mapping[str, torch.Tensor]) -> AbstractContextManager[object]:
    """Raise BundleError, within a `with` statement, for modules far larger than their weights.

    They are refused before their memory is written to: a file of a megabyte may come with the
    description of a model that fills the machine. Other threads are not affected.
    """
    # A parameter is registered twice if it is parametrized, for example by a weight norm.
    budget = 2 * sum(value.numel() for value in weights.values()) + MAX_UNSAVED_PARAMETERS
    thread = threading.get_ident()

    def count(_: object, name: str, parameter: torch.nn.Parameter) -> None:
        nonlocal budget
        budget -= parameter.numel() if threading.get_ident() == thread else 0
        if budget < 0:
            raise BundleError(
                f"The parts of the model, up to its parameter `{name}`, are more than twice as "
                "large as its weights. Export it again."
            )

    return register_module_parameter_registration_hook(count)


def check_finite(weights: Mapping[str, Any], *, of: str, parameters: Container[str] = ()) -> None:
    """Raise BundleError for tensors that hold NaN, and for infinite ones among the ``parameters``.

    A buffer may be infinite: it may be a mask.
    """
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            continue
        finite = value.isfinite() if name in parameters else ~value.isnan()
        if not bool(finite.all()):
            count = value.numel() - int(finite.sum())
            raise BundleError(
                f"Weights must be finite, but {name} in {of} holds {count} of {value.numel()} that "
                f"{'is' if count == 1 else 'are'} not. Restore an earlier checkpoint, or train "
                "again with a lower `lr`."
            )


def check_same_model(saved: Mapping[str, Any], declared: Mapping[str, Any], *, of: str) -> None:
    """Raise BundleError for weights of another model, with the first differences and sizes."""
    differences = [
        f"{key}: {size_in(saved, key)} saved, {size_in(declared, key)} declared"
        for key in sorted({*saved, *declared})
        if size_in(saved, key) != size_in(declared, key)
    ]
    if differences:
        count = plural(len(differences), "tensor differs", "tensors differ")
        raise BundleError(
            f"The weights in {of} do not fit the declared model: {count} "
            f"({listed(differences, separator='; ')}). Use the YAML they were trained with, or "
            "another folder."
        )


def size_in(tensors: Mapping[str, Any], key: str) -> str:
    """Write the size of a tensor, and its type unless it holds floats; "none" if it is missing."""
    if key not in tensors:
        return "none"
    value = tensors[key]
    size = "x".join(map(str, getattr(value, "shape", ()))) or "1"
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return size  # any float type fits any other
    kind = "complex" if value.is_complex() else str(value.dtype).removeprefix("torch.")
    return f"{size} {kind}"


def part_names(hparams: Mapping[str, Any]) -> list[str]:
    """Name the parts of the ModuleList in order; a part without a key keeps its index."""
    model = hparams.get("model")
    if not isinstance(model, nn.ModuleList):
        return []
    keys = {id(value): key for key, value in hparams.items() if isinstance(value, nn.Module)}
    return [keys.get(id(module), str(index)) for index, module in enumerate(model)]


def part_names_in(root: CommentedMap) -> list[str]:
    """Name the parts in order from a resolved YAML, in which an alias is the node itself."""
    keys = {id(node): str(key) for key, node in root.items()}
    arguments = root.get("model")  # by position, or as `modules`
    is_map = isinstance(arguments, CommentedMap)
    nodes = arguments.get("modules") if is_map else arguments and arguments[0]
    return [keys.get(id(node), str(index)) for index, node in enumerate(nodes or ())]


def to_part_name(name: str, parts: Sequence[str]) -> str:
    """Turn `0.conv1.weight` into `CNN.conv1.weight`."""
    index, _, path = name.partition(".")
    if not index.isdecimal() or int(index) >= len(parts):
        return name
    return f"{parts[int(index)]}.{path}"


def tensors_by_part(hparams: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters and buffers of the model by part and path."""
    model = hparams.get("model")
    if not isinstance(model, nn.Module):
        return {}
    parts = part_names(hparams)
    tensors = model.state_dict(keep_vars=True)
    return {to_part_name(name, parts): tensor for name, tensor in tensors.items()}
