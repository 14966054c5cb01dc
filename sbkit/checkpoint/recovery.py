"""Load what a checkpoint holds into the objects that it was saved from.

An optimizer resumes with the moments that were saved, and the hyperparameters as declared.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.checkpoints import (
    DEFAULT_LOAD_HOOKS,
    Checkpoint,
    Checkpointer,
    get_default_hook,
    torch_recovery,
)
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.base.text import listed
from sbkit.checkpoint.integrity import reading

# What schedules write into the groups, SpeechBrain's and torch's: they go on from what they wrote.
SCHEDULED = {"lr", "initial_lr", "prev_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
CYCLED = {"momentum", "betas"}  # by schedules that leave a `base_momentum`
NAMES = {"params", "param_names"}

Group = Mapping[str, Any]


def recover(checkpointer: Checkpointer, checkpoint: Checkpoint) -> list[str]:
    """Load every recoverable from its file; return messages for the user.

    Raises SbkitError when a file is missing, cannot be read, or is of another optimizer.
    """
    messages = []
    may_lack, optional = checkpointer.allow_partial_load, checkpointer.optional_recoverables
    for name, recoverable in checkpointer.recoverables.items():
        if name in checkpoint.paramfiles:
            hook = checkpointer.custom_load_hooks.get(name)
            messages += _load(name, recoverable, checkpoint, hook)
        elif not (may_lack or "dataloader" in name or optional.get(name)):
            raise SbkitError(
                f"{checkpoint.path} must hold every recoverable, but has no `{name}`. Use the YAML "
                "that it was trained with, or move it away to go on from the one before."
            )
        else:
            messages.append(f"{checkpoint.path} has no `{name}`, which starts new.")
    return messages


def _load(name: str, recoverable: Any, checkpoint: Checkpoint, hook: Any) -> list[str]:
    file = checkpoint.paramfiles[name]
    hook = hook or get_default_hook(recoverable, DEFAULT_LOAD_HOOKS)
    with reading(file):
        if hook is torch_recovery and isinstance(recoverable, Optimizer):
            differences = load_optimizer(recoverable, file)
            goes_on = f"`{name}` goes on as it is declared now ({'; '.join(differences)})."
            return [goes_on] if differences else []
        if hook is None:
            raise TypeError(f"there is no way to load {type(recoverable).__name__}")
        hook(recoverable, file, checkpoint.meta.get("end-of-epoch", True))
    return []


def load_optimizer(optimizer: Optimizer, file: Path) -> list[str]:
    """Load the moments and the rate; return the hyperparameters that are declared otherwise now.

    Raises SbkitError where the file is of an optimizer of other groups or of another class.
    """
    state = torch.load(file, "cpu", weights_only=True)
    saved, declared = state["param_groups"], optimizer.param_groups
    sizes = [" + ".join(str(len(each["params"])) for each in side) for side in (saved, declared)]
    gone, new = (
        sorted({name for each in one for name in each}.difference(*other, SCHEDULED, NAMES))
        for one, other in ((saved, declared), (declared, saved))
    )
    if sizes[0] != sizes[1] or (gone and new):  # either alone may come with another torch
        raise SbkitError(
            f"The optimizer in {file} must be the declared one, but was saved with groups of "
            f"{sizes[0]} parameters and {listed(gone)}, and is declared with {sizes[1]} and "
            f"{listed(new)}. Use the YAML that it was trained with, or another output_folder."
        )
    pairs = list(zip(saved, declared, strict=True))
    groups = [{**old, **_declared(old, new)} for old, new in pairs]
    optimizer.load_state_dict({**state, "param_groups": groups})
    changed = [each for old, new in pairs for each in _differences(old, _declared(old, new))]
    return list(dict.fromkeys(changed))


def _declared(saved: Group, declared: Group) -> dict[str, Any]:
    """Return the hyperparameters of a group that no schedule writes."""
    kept = SCHEDULED | NAMES | (CYCLED if "base_momentum" in saved else set())
    return {name: value for name, value in declared.items() if name not in kept}


def _differences(saved: Group, declared: Group) -> Iterator[str]:
    for name, value in declared.items():
        if name in saved and saved[name] != value:
            yield f"{name}: {value}, {saved[name]} when it was saved"
