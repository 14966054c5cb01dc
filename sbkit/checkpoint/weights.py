"""Weights and optimizer states of checkpoints: read, averaged, and checked against the model."""

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml.comments import CommentedMap
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from sbkit.base.errors import BundleError, ConfigError
from sbkit.base.files import parsing_errors, require_regular
from sbkit.base.messages import listed, plural
from sbkit.checkpoint.folder import Checkpoint

RENAMED_BY_SPEECHBRAIN = {  # parts of names, in its pull requests 2489 and 2463
    ".mutihead_attn": ".multihead_attn",
    ".convs_intermedite": ".convs_intermediate",
}
CHECKPOINT_CONTENT = "hold what training saved"  # "FILE must ...", in errors about checkpoints

# ---- reading and averaging


def read_weights(file: Path) -> dict[str, Any]:
    """Read a state_dict onto the CPU, with tensors named as in the installed SpeechBrain.

    NaN is refused here. Infinite parameters are refused only by `check_fits`, because the file does
    not say which tensors are parameters.
    """
    fix = f"Restore it, or move {file.parent} away to resume from the previous checkpoint."
    with parsing_errors(file, CHECKPOINT_CONTENT, fix=fix):
        require_regular(file)
        weights = torch.load(file, "cpu", weights_only=True)
        if not isinstance(weights, Mapping):
            raise ValueError(f"it holds a {type(weights).__name__}")
        size = sum(value.nbytes for value in weights.values() if isinstance(value, Tensor))
        # Tied tensors share bytes of the file; an expanded tensor could claim any size.
        if size > 2 * file.stat().st_size:
            raise ValueError("its tensors are larger than the file")
        check_finite(weights, place=str(file))
        return {renamed(name): value for name, value in weights.items()}


def renamed(name: str) -> str:
    """Return the present name of a tensor that an earlier SpeechBrain has named."""
    for former, present in RENAMED_BY_SPEECHBRAIN.items():
        name = name.replace(former, present)
    return name


def average_checkpoints(checkpoints: Sequence[Checkpoint], name: str) -> dict[str, Any]:
    """Average the weights of a module over checkpoints."""
    return average_files([checkpoint.paramfiles[name] for checkpoint in checkpoints], read_weights)


def average_files(files: Sequence[Path], read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Average the weights of one model over files; integers are taken from the first file.

    Files are added one by one in float64, so memory holds two models at most.
    """
    mean = read(files[0])
    if len(files) == 1:
        return mean
    dtypes = {
        key: value.dtype
        for key, value in mean.items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    }
    for key, dtype in dtypes.items():
        mean[key] = mean[key].to(torch.promote_types(dtype, torch.float64))
    for file in files[1:]:
        weights = read(file)
        check_same_model(weights, mean, place=str(file))
        for key in dtypes:
            mean[key] += weights[key]
    return mean | {key: (mean[key] / len(files)).to(dtypes[key]) for key in dtypes}


# ---- checking against the model


def check_fits(weights: Mapping[str, Any], module: nn.Module, *, place: str) -> None:
    """Raise BundleError for weights of another model, and for weights that are not finite."""
    check_same_model(weights, module.state_dict(), place=place)
    parameters = {name for name, _ in module.named_parameters()}
    check_finite(weights, place=place, parameters=parameters)


def check_same_model(saved: Mapping[str, Any], declared: Mapping[str, Any], *, place: str) -> None:
    """Raise BundleError if names, shapes or types differ, and list the first differences."""
    if differences := differing_tensors(saved, declared):
        count = plural(len(differences), "tensor differs", "tensors differ")
        raise BundleError(
            f"The weights in {place} are of another model: {count} "
            f"({listed(differences, separator='; ')})."
        )


def differing_tensors(saved: Mapping[str, Any], declared: Mapping[str, Any]) -> list[str]:
    """Describe the tensors whose names, shapes or types differ."""
    return [
        f"{name}: {describe_tensor(saved, name)} instead of {describe_tensor(declared, name)}"
        for name in sorted({*saved, *declared})
        if describe_tensor(saved, name) != describe_tensor(declared, name)
    ]


def describe_tensor(tensors: Mapping[str, Any], name: str) -> str:
    """Write the shape of a tensor, and its type unless it holds floats; "none" if it is missing."""
    if name not in tensors:
        return "none"
    value = tensors[name]
    if not isinstance(value, Tensor):
        return "no tensor"
    shape = "x".join(map(str, value.shape)) or "scalar"
    if value.is_floating_point():
        return shape  # weights of one float type can be loaded into another
    kind = "complex" if value.is_complex() else str(value.dtype).removeprefix("torch.")
    return f"{shape} {kind}"


def check_finite(
    weights: Mapping[str, Any], *, place: str, parameters: Container[str] = ()
) -> None:
    """Raise BundleError for a tensor with NaN, and for one of the ``parameters`` with infinity.

    Other tensors may be infinite: a buffer may be a mask.
    """
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            continue
        is_valid = value.isfinite() if name in parameters else ~value.isnan()
        if num_invalid := value.numel() - int(is_valid.sum()):
            raise BundleError(
                f"Weights must be finite, but {num_invalid} of the {value.numel()} values of "
                f"{name} in {place} {'is' if num_invalid == 1 else 'are'} not."
            )


# ---- the size of a bundle's model

MAX_UNSAVED_PARAMETERS = 1 << 24  # allowed for parts whose weights are not in the file


def parameter_budget(weights: Mapping[str, Tensor]) -> int:
    """Return the number of parameters that a model with these weights may have."""
    # A parametrized parameter, for example one with weight norm, is registered twice.
    return 2 * sum(value.numel() for value in weights.values()) + MAX_UNSAVED_PARAMETERS


def limit_parameters(weights: Mapping[str, Tensor]) -> AbstractContextManager[object]:
    """Refuse to build a model far larger than its weights, inside a `with` statement.

    A file of one megabyte could describe a model that fills the memory. BundleError is raised
    before the memory of a parameter is written to. Only the calling thread is limited.
    """
    budget = parameter_budget(weights)
    thread = threading.get_ident()

    def spend(_: object, name: str, parameter: nn.Parameter) -> None:
        nonlocal budget
        budget -= parameter.numel() if threading.get_ident() == thread else 0
        if budget < 0:
            raise BundleError(
                f"The parts of the model up to `{name}` are more than twice as large as the "
                "weights in its file."
            )

    return register_module_parameter_registration_hook(spend)


# ---- the state of optimizers

DECLARED_KEY = "declared"  # in an optimizer's group: its hyperparameters as the YAML declares them


def add_declared(optimizer: Optimizer) -> None:
    """Add the hyperparameters of an optimizer that has not stepped to its saved groups."""
    for group in optimizer.param_groups:
        declared = {name: value for name, value in group.items() if name not in ("params", "lr")}
        group.setdefault(DECLARED_KEY, declared)


def restore_declared(
    optimizer: Optimizer, declared_groups: Sequence[Mapping[str, Any]], *, checkpoint: Path
) -> None:
    """Set a loaded optimizer to its declared hyperparameters.

    Values that training had changed stay as loaded: the learning rate, and values set by a schedule
    or the optimizer itself, such as a number of steps.
    """
    for group, declared in zip(optimizer.param_groups, declared_groups, strict=True):
        before = group.get(DECLARED_KEY, {})  # SpeechBrain saves none
        removed, added = before.keys() - declared.keys(), declared.keys() - before.keys()
        # Another version of torch may add hyperparameters or remove some, but not both.
        if removed and added:
            raise ConfigError(
                f"The optimizer in {checkpoint} was saved with {listed(sorted(removed))}, but is "
                f"declared with {listed(sorted(added))}."
            )
        changed = {name for name, value in before.items() if group[name] != value}
        group |= {name: value for name, value in declared.items() if name not in changed}
        group[DECLARED_KEY] = declared


# ---- names of tensors by part
#
# A checkpoint of a torch.nn.ModuleList numbers its modules. Another YAML may list other parts, or
# list them in another order, so a tensor is named after the YAML key of its part:
# `CNN.conv1.weight`.


def part_names_of_model(hparams: Mapping[str, Any]) -> list[str]:
    """List the keys of the model's parts in order; a part without a key gets its index."""
    model = hparams.get("model")
    if not isinstance(model, nn.ModuleList):
        return []
    keys = {id(value): key for key, value in hparams.items() if isinstance(value, nn.Module)}
    return [keys.get(id(module), str(index)) for index, module in enumerate(model)]


def part_names_of_yaml(root: CommentedMap) -> list[str]:
    """List the keys of the model's parts in order, without building anything.

    ``root`` is a resolved YAML: an alias in it is the same object as its anchor.
    """
    keys = {id(node): str(key) for key, node in root.items()}
    arguments = root.get("model")  # by position, or as `modules`
    is_map = isinstance(arguments, CommentedMap)
    nodes = arguments.get("modules") if is_map else arguments and arguments[0]
    return [keys.get(id(node), str(index)) for index, node in enumerate(nodes or ())]


def to_part_name(name: str, parts: Sequence[str]) -> str:
    """Turn `0.conv1.weight` into `CNN.conv1.weight`, and `0` into `CNN`."""
    index, dot, path = name.partition(".")
    if not index.isdecimal() or int(index) >= len(parts):
        return name
    return f"{parts[int(index)]}{dot}{path}"


def tensors_by_part(hparams: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters and buffers of the model by part and path."""
    model = hparams.get("model")
    if not isinstance(model, nn.Module):
        return {}
    parts = part_names_of_model(hparams)
    tensors = model.state_dict(keep_vars=True)
    return {to_part_name(name, parts): tensor for name, tensor in tensors.items()}
