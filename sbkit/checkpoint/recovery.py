"""Load what a checkpoint holds into the objects that it was saved from.

An optimizer goes on: its moments are those that were saved, its hyperparameters as declared.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
from speechbrain.utils.epoch_loop import EpochCounter
from torch import Tensor
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.integrity import reading
from sbkit.checkpoint.rng import check_count, check_number

MOST_EPOCHS = 10**6
# What schedules write into the groups, SpeechBrain's and torch's: they go on from what they wrote.
SCHEDULED = {"lr", "initial_lr", "prev_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
CYCLED = {"momentum", "betas"}  # by schedules that leave a `base_momentum`
NAMES = {"params", "param_names"}

Group = Mapping[str, Any]


def needed_of(checkpointer: Checkpointer) -> list[str]:
    """Name the recoverables that a checkpoint must hold, as SpeechBrain has it."""
    if checkpointer.allow_partial_load:
        return []
    optional = checkpointer.optional_recoverables
    return [
        name
        for name in checkpointer.recoverables
        if not optional.get(name, False) and "dataloader" not in name
    ]


def recover(checkpointer: Checkpointer, checkpoint: Checkpoint) -> list[str]:
    """Load every recoverable from its file; give what there is to be said about it.

    Raises SbkitError when a file is missing, cannot be read, or is of another optimizer.
    """
    facts = []
    for name, recoverable in checkpointer.recoverables.items():
        if name in checkpoint.paramfiles:
            hook = checkpointer.custom_load_hooks.get(name)
            facts += _load(name, recoverable, checkpoint, hook)
        elif name in needed_of(checkpointer):
            raise SbkitError(
                f"{checkpoint.path} must hold every recoverable, but has no `{name}`. Use the YAML "
                "that it was trained with, or another output_folder."
            )
        else:
            facts.append(f"{checkpoint.path} has no `{name}`, which begins afresh.")
    return facts


def _load(name: str, recoverable: Any, checkpoint: Checkpoint, hook: Any) -> list[str]:
    file = checkpoint.paramfiles[name]
    hook = hook or get_default_hook(recoverable, DEFAULT_LOAD_HOOKS)
    if hook is torch_recovery and isinstance(recoverable, Optimizer):
        differences = load_optimizer(recoverable, file)
        goes_on = f"`{name}` goes on as it is declared now ({'; '.join(differences)})."
        return [goes_on] if differences else []
    with reading(file):
        if hook is None:
            raise TypeError(f"there is no way to load {type(recoverable).__name__}")
        hook(recoverable, file, checkpoint.meta.get("end-of-epoch", True))
        if isinstance(recoverable, EpochCounter):
            check_count("epoch", recoverable.current, MOST_EPOCHS)
    return []


def load_optimizer(optimizer: Optimizer, file: Path) -> list[str]:
    """Load the moments and the rate; return the hyperparameters that are declared otherwise now.

    Raises SbkitError when the file is of another optimizer, of other groups, or of moments that
    have another shape or are not finite.
    """
    with reading(file):
        state = torch.load(file, "cpu", weights_only=True)
        saved, declared = state["param_groups"], optimizer.param_groups
        _refuse_other(saved, declared, of=file)
        _refuse_unfit_rates(saved)
        pairs = list(zip(saved, declared, strict=True))
        _refuse_other_moments(state["state"], pairs, optimizer, of=file)
        groups = [{**old, **_declared(old, new)} for old, new in pairs]
        optimizer.load_state_dict({**state, "param_groups": groups})
    told = [each for old, new in pairs for each in _differences(old, _declared(old, new))]
    return list(dict.fromkeys(told))


def _refuse_other(saved: Sequence[Group], declared: Sequence[Group], *, of: Path) -> None:
    """Compare the sizes of the groups, and the names of their hyperparameters."""
    sizes = [" + ".join(str(len(each["params"])) for each in side) for side in (saved, declared)]
    if sizes[0] != sizes[1]:
        raise _another(of, f"groups of {sizes[0]} parameters saved, {sizes[1]} declared")
    there, here = ({name for each in side for name in each} for side in (saved, declared))
    gone, new = (sorted(each - SCHEDULED - NAMES) for each in (there - here, here - there))
    if gone and new:  # either alone may come with another version of torch
        raise _another(of, f"{', '.join(gone)} saved, {', '.join(new)} declared")


def _refuse_unfit_rates(saved: Sequence[Group]) -> None:
    """Refuse what no schedule writes, before a step is taken with it."""
    for group in saved:
        for name in SCHEDULED & group.keys():
            value = group[name]
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            check_number(name, value)
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` is {str(value)[:40]!r} and no rate")


def _refuse_other_moments(
    moments: Mapping[int, Mapping[str, Any]],
    pairs: Sequence[tuple[Group, Group]],
    optimizer: Optimizer,
    *,
    of: Path,
) -> None:
    """Compare what was saved of each parameter with what a step of this optimizer keeps of it.

    A fused kernel reads past the end of a moment that is too short.
    """
    for old, new in pairs:
        like: dict[Any, Mapping[str, Any]] = {}  # by what the moments depend on
        for at, parameter in zip(old["params"], new["params"], strict=True):
            kept, kind = moments.get(at), (parameter.shape, parameter.dtype)
            if not kept:
                continue
            if kind not in like:
                like[kind] = _moments_of(optimizer, new, parameter)
            lacking = sorted(like[kind].keys() - kept.keys())
            if lacking:
                raise _another(of, f"{', '.join(lacking)} declared, but not saved")
            for name, value in kept.items():
                _refuse_unfit(name, value, like[kind].get(name), of=of)


def _refuse_unfit(name: str, saved: Any, wanted: Any, *, of: Path) -> None:
    """Refuse a moment of another shape or type, or one that no training leaves behind."""
    saved_size, size = (tuple(getattr(each, "shape", ())) for each in (saved, wanted))
    if wanted is not None and saved_size != size:
        raise _another(of, f"`{name}` has shape {list(saved_size)} saved, {list(size)} declared")
    number = torch.as_tensor(0.0 if saved is None else saved)
    if number.layout is not torch.strided or number.is_meta:
        raise ValueError(f"`{name}` is no plain tensor")
    if number.is_complex() and isinstance(wanted, Tensor) and wanted.is_complex():
        number = torch.view_as_real(number)
    is_count = name == "step"
    if number.is_complex() or not (is_count or number.is_floating_point() or not number.ndim):
        raise ValueError(f"`{name}` is of {number.dtype}, which no optimizer keeps")
    if not number.isfinite().all():
        raise ValueError(f"`{name}` holds numbers that are not finite")
    if (is_count or name.endswith("_sq")) and bool((number < 0).any()):
        raise ValueError(f"`{name}` is below 0")


def _moments_of(optimizer: Optimizer, group: Group, parameter: Tensor) -> dict[str, Any]:
    """Return what an optimizer keeps of a parameter, by a step of a copy over one like it.

    An optimizer that needs more for a step, such as a closure, keeps nothing here.
    """
    like = torch.zeros_like(parameter, requires_grad=True)
    like.grad = torch.zeros_like(parameter)
    trial = copy.copy(optimizer)
    trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [like]}]
    with suppress(Exception):
        trial.step()
    return dict(trial.state[like])


def _another(file: Path, difference: str) -> SbkitError:
    return SbkitError(
        f"The optimizer in {file} must be the declared one, but is another ({difference}). Use the "
        "YAML that it was trained with, or another output_folder."
    )


def _declared(saved: Group, declared: Group) -> dict[str, Any]:
    """Return the hyperparameters of a group that no schedule writes."""
    kept = SCHEDULED | NAMES | (CYCLED if "base_momentum" in saved else set())
    return {name: value for name, value in declared.items() if name not in kept}


def _differences(saved: Group, declared: Group) -> Iterator[str]:
    for name, value in declared.items():
        if name in saved and saved[name] != value:
            yield f"{name}: {value}, {saved[name]} when it was saved"
