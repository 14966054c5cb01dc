"""An optimizer goes on: its moments are those that were saved, its hyperparameters as declared."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.integrity import reading

# What schedules write into the groups, SpeechBrain's and torch's: they go on from what they wrote.
SCHEDULED = {"lr", "initial_lr", "prev_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
CYCLED = {"momentum", "betas"}  # by schedules that leave a `base_momentum`
NAMES = {"params", "param_names"}

Group = Mapping[str, Any]


def load_optimizer(optimizer: Optimizer, file: Path) -> list[str]:
    """Load the moments and the rate; give the hyperparameters that are declared otherwise now.

    Raises SbkitError when the file is of another optimizer, or of other groups.
    """
    with reading(file):
        state = torch.load(file, "cpu", weights_only=True)
        saved, declared = state["param_groups"], optimizer.param_groups
        _refuse_other(saved, declared, of=file)
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


def _refuse_other_moments(
    moments: Mapping[int, Mapping[str, Any]],
    pairs: Sequence[tuple[Group, Group]],
    optimizer: Optimizer,
    *,
    of: Path,
) -> None:
    """Look at one parameter of each group for what a step would miss, as of `amsgrad`."""
    for old, new in pairs:
        numbered = zip(old["params"], new["params"], strict=True)
        known = [(moments[at], parameter) for at, parameter in numbered if moments.get(at)]
        for kept, parameter in known[:1]:
            lacking = sorted(_moments_of(optimizer, new, parameter) - kept.keys())
            if lacking:
                raise _another(of, f"{', '.join(lacking)} declared, but not saved")


def _moments_of(optimizer: Optimizer, group: Group, parameter: Tensor) -> set[str]:
    """Name what an optimizer keeps of a parameter, by a step of a copy over one like it.

    An optimizer that needs more for a step, such as a closure, names nothing.
    """
    like = torch.zeros_like(parameter, requires_grad=True)
    like.grad = torch.zeros_like(parameter)
    trial = copy.copy(optimizer)
    trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [like]}]
    with suppress(Exception):
        trial.step()
    return set(trial.state[like])


def _another(file: Path, difference: str) -> SbkitError:
    return SbkitError(
        f"The optimizer in {file} must be the declared one, but is another ({difference}). Use the "
        "YAML that it was trained with, or another output_folder."
    )


def _declared(saved: Group, declared: Group) -> dict[str, Any]:
    """Give the hyperparameters of a group that no schedule writes."""
    kept = SCHEDULED | NAMES | (CYCLED if "base_momentum" in saved else set())
    return {name: value for name, value in declared.items() if name not in kept}


def _differences(saved: Group, declared: Group) -> Iterator[str]:
    for name, value in declared.items():
        if name in saved and saved[name] != value:
            yield f"{name}: {value}, {saved[name]} when it was saved"
