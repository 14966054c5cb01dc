"""What checkpoints hold: weights, read and averaged, and the state of optimizers."""

from collections.abc import Mapping, Sequence
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
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.base.files import reading
from sbkit.base.text import listed
from sbkit.checkpoint.comparison import check_finite, check_same_model
from sbkit.checkpoint.integrity import SAVED

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
