"""Ownership: whatever holds parameters is inside the one ModuleList.

What is outside it stays on the CPU, in no optimizer and in no checkpoint (SpeechBrain #2804). What
is inside is in one group of the optimizer, in DDP, and in checkpoints.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sbkit.base.text import listed, plural
from sbkit.check.finding import Finding
from sbkit.check.model.dry_run import DryRun, dry_run
from sbkit.check.model.walk import reached
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Keys, dotted

CHECK = "ownership"
OWNED = "every parameter must be in the one ModuleList `model`"


def check_ownership(planned: PlannedRun) -> Iterator[Finding]:
    """Find what the ModuleList does not own, and what it owns twice."""
    if "model" in planned.faults:  # nothing is owned, for this one cause
        return
    for holder, parameters in _unowned_parameters(planned).items():
        yield _unowned(planned, holder, parameters)
    with suppress(MissingPartError):
        yield from _foreign(planned, dry_run(planned))
    yield from _twice(planned)


def _owned_modules(hparams: dict[str, Any]) -> Iterator[nn.Module]:
    """Yield all modules of ModuleLists, and of SpeechBrain's `modules`."""
    for name, value in hparams.items():
        if isinstance(value, nn.ModuleList):
            yield from value.modules()
        elif name == "modules" and isinstance(value, dict):
            for each in value.values():
                yield from each.modules() if isinstance(each, nn.Module) else ()


def _unowned_parameters(planned: PlannedRun) -> dict[Keys, list[tuple[Keys, Tensor]]]:
    """Collect the parameters outside the list, by the largest module around them."""
    inside: set[int] = set()
    for part in _owned_modules(planned.hparams):
        inside |= {id(part), *map(id, part.parameters(recurse=False))}
    owned = {keys for keys, each in reached(planned) if id(each) in inside}
    modules = {keys for keys, each in reached(planned) if isinstance(each, nn.Module)} - owned
    unowned: dict[Keys, list[tuple[Keys, Tensor]]] = {}
    for keys, each in reached(planned):
        if id(each) not in inside and isinstance(each, nn.Parameter):
            above = [keys[:depth] for depth in range(1, len(keys))]
            parts = [each for each in above if each in owned]
            hidden = keys[: len(parts[-1]) + 1] if parts else None  # what a part of `model` holds
            holder = hidden or next((each for each in above if each in modules), keys)
            unowned.setdefault(holder, []).append((keys, each))
    return unowned


def _unowned(planned: PlannedRun, holder: Keys, tensors: list[tuple[Keys, Tensor]]) -> Finding:
    count = sum(each.numel() for _, each in tensors)
    held, key = dict(reached(planned)).get(holder), holder[0]
    fix = "Declare it in the YAML, and add it to the list of `model`."
    if len(holder) > 1 and isinstance(held, list | tuple | dict):
        fix = (
            f"Use torch.nn.ModuleList instead of a Python {type(held).__name__} for "
            f"`{holder[-1]}`: `{dotted(holder[:-1])}` does not know what is in it."
        )
    elif key in planned.document.root:
        fix = f"Add `!ref <{key}>` to the list of `model`, or take `{key}` out if nothing uses it."
    return planned.finding(
        CHECK,
        *_place(planned, holder),
        declared=OWNED,
        effect=f"`{dotted(holder)}` holds {plural(count, 'parameter')} outside it "
        f"({_named(tensors)}), on the CPU, in no optimizer and in no checkpoint",
        fix=fix,
    )


def _foreign(planned: PlannedRun, seen: DryRun) -> Iterator[Finding]:
    """Find parameters that a step used and nothing reachable holds, such as those in a cache."""
    known = {id(each) for _, each in reached(planned)}
    users: dict[Keys, list[nn.Parameter]] = {}
    for parameter, inside in seen.foreign:
        if id(parameter) not in known:
            users.setdefault(_running(planned, inside), []).append(parameter)
    for user, parameters in users.items():
        yield planned.finding(
            CHECK,
            *user,
            declared=OWNED,
            effect=f"a step in `{dotted(user)}` uses "
            f"{plural(sum(each.numel() for each in parameters), 'parameter')} that no part of it "
            f"holds (the first: {list(parameters[0].shape)}), in no optimizer and in no checkpoint",
            fix=f"Make them in `__init__`, as attributes of a module of `{dotted(user)}`.",
        )


def _running(planned: PlannedRun, inside: Sequence[Keys]) -> Keys:
    """Return the innermost of the running modules that the YAML names."""
    named = [keys for keys in inside if keys and keys[0] in planned.document.root]
    return named[-1] if named else ("model",)


def _named(tensors: list[tuple[Keys, Tensor]]) -> str:
    return listed((f"`{dotted(keys)}`" for keys, _ in tensors), most=1)


def _place(planned: PlannedRun, holder: Keys) -> Keys:
    return holder if holder[0] in planned.document.root else ("model",)


def _twice(planned: PlannedRun) -> Iterator[Finding]:
    """Find a part that is in the list more than once."""
    parts = list(planned.model)
    for index, part in enumerate(parts):
        first = next(number for number, each in enumerate(parts) if each is part)
        if first < index:
            name = next(keys for keys, each in reached(planned) if each is part)
            yield planned.finding(
                CHECK,
                *("model", 0, index),
                declared="every part must be in the list of `model` once",
                effect=f"`model.{first}` and `model.{index}` are one part, `{dotted(name)}`, which "
                "would be saved twice",
                fix="Take all but one out of the list.",
            )


def check_groups(planned: PlannedRun) -> Iterator[Finding]:
    """Find what would not be saved, and what would be trained never, twice, or apart."""
    if not planned.has_recipe:
        yield from _unsaved(planned, planned.hparams.get("checkpointer"), ())
    brain, checkpointer = planned.brain, copy.copy(planned.brain.checkpointer)
    try:
        optimizers = optimizers_of(brain, checkpointer)
    except Exception as error:
        yield planned.finding(
            CHECK,
            "opt_class",
            declared="optimizers must take the parameters of the model",
            effect=f"they cannot be made ({type(error).__name__}: {error})",
            fix="Correct `opt_class`, or the recipe's `init_optimizers`.",
        )
        return
    yield from _unsaved(planned, checkpointer, optimizers)
    for tensors, effect, fix in _misplaced(planned.model, brain.modules, optimizers):
        if tensors:
            yield planned.finding(
                CHECK,
                "opt_class",
                declared="every parameter of the model must be in one group of the optimizer",
                effect=f"{_several(planned, tensors)} would be {effect}",
                fix=fix,
            )


def optimizers_of(brain: Any, checkpointer: Any) -> list[Optimizer]:
    """Make the optimizers as a run does, for a copy of the Brain, and one of its checkpointer."""
    trial = copy.copy(brain)
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


def _unsaved(
    planned: PlannedRun, checkpointer: Any, optimizers: Sequence[Optimizer]
) -> Iterator[Finding]:
    """Find what of the model, the epochs and the optimizers the checkpointer does not save."""
    recoverables: dict[str, Any] | None = getattr(checkpointer, "recoverables", None)
    if recoverables is None:
        return
    modules = [each for each in recoverables.values() if isinstance(each, nn.Module)]
    saved = {id(each) for part in modules for each in (*part.parameters(), *part.buffers())}
    tensors = (*planned.model.parameters(), *planned.model.buffers())
    missing = [each for each in tensors if id(each) not in saved]
    known = {id(None), *map(id, recoverables.values())}
    wanted = (planned.hparams.get("epoch_counter"), *optimizers)
    lost = [type(each).__name__ for each in wanted if id(each) not in known]
    if missing or lost:
        what = [*([_several(planned, missing)] if missing else []), *dict.fromkeys(lost)]
        yield planned.finding(
            CHECK,
            *("checkpointer", "recoverables"),
            declared="the checkpointer must save the whole model, the epochs and the optimizers",
            effect=f"{listed(what)} would be in no checkpoint: it saves "
            f"{', '.join(f'`{name}`' for name in recoverables) or 'nothing'}",
            fix="Write `model: !ref <model>` and `epochs: !ref <epoch_counter>` there; add an "
            "optimizer in `init_optimizers`: `self.checkpointer.add_recoverable(NAME, OPTIMIZER)`.",
        )


def _several(planned: PlannedRun, tensors: Sequence[Tensor]) -> str:
    paths = (keys for keys, each in reached(planned) if each is tensors[0])
    first = next((f"`{dotted(keys)}`" for keys in paths), "a parameter outside the YAML")
    return listed([first, *tensors[1:]], most=1)
