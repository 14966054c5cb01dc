"""Every parameter to be trained is in one group of the optimizer, in DDP, and in checkpoints."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sbkit.check.finding import Finding
from sbkit.check.model.object_walk import reached
from sbkit.check.model.ownership import CHECK
from sbkit.check.planned_run import PlannedRun
from sbkit.config.document import dotted


def check_groups(planned: PlannedRun) -> Iterator[Finding]:
    """Find what would not be saved, and what would be trained never, twice, or apart."""
    yield from _unsaved(planned)
    brain = planned.brain
    try:
        optimizers = optimizers_of(brain)
    except Exception as error:
        yield planned.finding(
            CHECK,
            "opt_class",
            declared="optimizers must take the parameters of the model",
            effect=f"they cannot be made ({type(error).__name__}: {error})",
            fix="Correct `opt_class`, or the recipe's `init_optimizers`.",
        )
        return
    for tensors, effect, fix in _misplaced(planned.model, brain.modules, optimizers):
        if tensors:
            yield planned.finding(
                CHECK,
                "opt_class",
                declared="every parameter of the model must be in one group of the optimizer",
                effect=f"{_several(planned, tensors)} would be {effect}",
                fix=fix,
            )


def optimizers_of(brain: Any) -> list[Optimizer]:
    """Make the optimizers as a run does, for a copy of the Brain and of its checkpointer."""
    trial, checkpointer = copy.copy(brain), copy.copy(brain.checkpointer)
    for name, value in vars(checkpointer).items() if checkpointer else ():
        if isinstance(value, dict):  # of recoverables, to which the optimizers add themselves
            setattr(checkpointer, name, dict(value))
    trial.checkpointer = checkpointer
    trial.init_optimizers()
    if trial.optimizers_dict is not None:
        return list(trial.optimizers_dict.values())
    return [trial.optimizer] if trial.opt_class is not None else []


def _misplaced(
    model: nn.Module, wrapped: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[list[Tensor], str, str]]:
    """Yield the parameters in no group, in several, and in no DDP, each with words on it."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    counts = Counter(id(each) for group in groups for each in group)
    trainable = {id(each): each for each in model.parameters() if each.requires_grad}
    grouped = {id(each): each for group in groups for each in group}
    in_ddp = {id(each) for each in wrapped.parameters()}
    yield (
        [each for key, each in trainable.items() if not counts[key]],
        "in no group of the optimizer: never trained",
        "Give every parameter of `model` to the optimizer.",
    )
    yield (
        [each for key, each in trainable.items() if counts[key] > 1],
        "in more than one group of the optimizers: stepped more than once a step",
        "Leave each parameter in one group.",
    )
    yield (
        [each for key, each in {**trainable, **grouped}.items() if key not in in_ddp],
        "not in the module that DDP wraps: processes would drift apart",
        "Train only what is in the Brain's `modules`.",
    )


def _unsaved(planned: PlannedRun) -> Iterator[Finding]:
    """Find what of the model is in no recoverable of the checkpointer."""
    recoverables = getattr(planned.hparams.get("checkpointer"), "recoverables", None)
    if recoverables is None:
        return
    modules = [each for each in recoverables.values() if isinstance(each, nn.Module)]
    saved = {id(each) for part in modules for each in (*part.parameters(), *part.buffers())}
    tensors = (*planned.model.parameters(), *planned.model.buffers())
    missing = [each for each in tensors if id(each) not in saved]
    if missing:
        names = ", ".join(f"`{name}`" for name in recoverables) or "nothing"
        yield planned.finding(
            CHECK,
            *("checkpointer", "recoverables"),
            declared="the checkpointer must save the whole model",
            effect=f"{_several(planned, missing)} would be in no checkpoint (its recoverables: "
            f"{names})",
            fix="Write `model: !ref <model>` among its recoverables.",
        )


def _several(planned: PlannedRun, tensors: Sequence[Tensor]) -> str:
    paths = (keys for keys, each in reached(planned) if each is tensors[0])
    first = next((f"`{dotted(keys)}`" for keys in paths), "a parameter outside the YAML")
    return first if len(tensors) == 1 else f"{first} and {len(tensors) - 1} more"
