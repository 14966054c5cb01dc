"""Checks of who owns a parameter: the one ModuleList, one group of an optimizer, the checkpointer.

A parameter outside the ModuleList stays on the CPU, in no optimizer and in no checkpoint
(SpeechBrain #2804). To find one, everything that can be reached is walked: modules, containers,
partials and attributes. What the walk cannot reach, such as a closure, the dry run finds.
"""

import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from logging import Logger

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from sbkit.base.messages import listed, plural
from sbkit.check.planned_run import Finding, MissingPartError, PlannedRun
from sbkit.config.document import Keys, dotted

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
LEAF_TYPES = (
    *(str, bytes, int, float, complex, types.NoneType, types.ModuleType, type),
    *(torch.dtype, torch.device, np.ndarray, np.generic, Logger),
    *(Dataset, DataLoader, Sampler),  # data: a million rows, and none of them is learned
)


def reached(planned: PlannedRun) -> list[tuple[Keys, object]]:
    """Return all objects within a run's hparams and its Brain, once, with their shortest paths."""
    roots = dict(planned.build_hparams().items())
    with suppress(MissingPartError):
        roots["brain"] = planned.make_cpu_brain()
    return planned.take("reached", lambda: list(_reach(roots)))


def _reach(roots: Mapping[str, object]) -> Iterator[tuple[Keys, object]]:
    """Walk breadth first, so that shorter paths come first."""
    waiting: deque[tuple[Keys, object]] = deque(((name,), root) for name, root in roots.items())
    seen: dict[int, object] = {}  # holds the objects themselves, or an id would come twice
    while waiting:
        keys, holder = waiting.popleft()
        if id(holder) in seen:
            continue
        seen[id(holder)] = holder
        yield keys, holder
        for name, child in _children(holder):
            if not isinstance(child, LEAF_TYPES):
                waiting.append(((*keys, name), child))


def _children(holder: object) -> Iterator[tuple[str | int, object]]:
    match holder:
        case Tensor():
            return
        case nn.Module():
            yield from (item for table in MODULE_TABLES for item in vars(holder)[table].items())
        case Mapping():
            yield from ((str(key), value) for key, value in list(holder.items()))
        case list() | tuple() | set() | frozenset() | deque():
            yield from enumerate(holder)
        case partial():
            yield from {"func": holder.func, "args": holder.args, **holder.keywords}.items()
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if not (isinstance(holder, nn.Module) and name in MODULE_TABLES):
            yield name, value


def check_ownership(planned: PlannedRun) -> Iterator[Finding]:
    """Find parameters outside the ModuleList, and parts that are in it twice."""
    objects, root = dict(reached(planned)), planned.document.root
    for holder, size in _unowned(planned).items():
        fix = f"Add `!ref <{holder[0]}>` to the list of `model`, or take it out."
        if isinstance(objects[holder], list | tuple | dict) or holder[0] not in root:
            fix = f"Make `{dotted(holder)}` a torch.nn.ModuleList or a part of `model`."
        yield planned.finding(
            *(holder if holder[0] in root else ("model",)),
            problem=f"`{dotted(holder)}` holds {plural(size, 'parameter')} outside the one "
            "ModuleList `model`, that is on the CPU, in no optimizer and in no checkpoint",
            fix=fix,
        )
    for part_id, count in Counter(map(id, planned.require_model())).items():
        if count > 1:
            name = next(keys for keys, part in objects.items() if id(part) == part_id)
            yield planned.finding(
                "model",
                problem=f"The list of `model` holds `{dotted(name)}` {count} times",
                fix="Take all but one out of the list.",
            )


def _unowned(planned: PlannedRun) -> Counter[Keys]:
    """Count the numbers in parameters outside the list, by the largest module around them."""
    model = planned.require_model()
    inside = {id(part) for part in (*model.modules(), *model.parameters())}
    owned = {keys for keys, part in reached(planned) if id(part) in inside}
    modules = {keys for keys, part in reached(planned) if isinstance(part, nn.Module)} - owned
    unowned = Counter[Keys]()
    for keys, parameter in reached(planned):
        if id(parameter) not in inside and isinstance(parameter, nn.Parameter):
            above = [keys[:depth] for depth in range(1, len(keys))]
            owners = [path for path in above if path in owned]
            hidden = keys[: len(owners[-1]) + 1] if owners else None  # in a part of `model`
            holder = hidden or next((path for path in above if path in modules), keys)
            unowned[holder] += parameter.numel()
    return unowned


def check_optimizers(planned: PlannedRun) -> Iterator[Finding]:
    """Find parameters that would not be trained, and state that would not be saved."""
    optimizers, model = planned.make_optimizers(), planned.require_model()
    grouped = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    counts = Counter(map(id, grouped))
    trainable = [p for p in model.parameters() if p.requires_grad]
    owned = set(map(id, model.parameters()))
    for parameters, problem in (
        ([p for p in trainable if not counts[id(p)]], "in no group, and would never train them"),
        ([p for p in trainable if counts[id(p)] > 1], "in more than one group, and steps twice"),
        ([p for p in grouped if id(p) not in owned], "in a group, though not in the model"),
    ):
        if parameters:
            yield planned.finding(
                "opt_class",
                problem=f"The optimizer has {_first_of(planned, parameters)} {problem}",
                fix="Give each parameter of `model` to one group of one optimizer, and no others.",
            )
    yield from _unsaved(planned, optimizers)


def _unsaved(planned: PlannedRun, optimizers: list[Optimizer]) -> Iterator[Finding]:
    """Find tensors of the model, epochs and optimizers that the checkpointer does not save."""
    checkpointer, model = planned.make_cpu_brain().checkpointer, planned.require_model()
    recoverables: dict[str, object] = getattr(checkpointer, "recoverables", {})
    modules = [part for part in recoverables.values() if isinstance(part, nn.Module)]
    saved = {id(t) for part in modules for t in (*part.parameters(), *part.buffers())}
    saved |= set(map(id, recoverables.values()))
    tensors = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in saved]
    unsaved = [_first_of(planned, tensors)] if tensors else []
    states = (planned.build_hparams()["epoch_counter"], *optimizers)
    unsaved += dict.fromkeys(type(state).__name__ for state in states if id(state) not in saved)
    if unsaved:
        yield planned.finding(
            *("checkpointer", "recoverables"),
            problem=f"{listed(unsaved)} would be in no checkpoint: the checkpointer saves "
            f"{', '.join(f'`{name}`' for name in recoverables) or 'nothing'}",
            fix="Write `model: !ref <model>` and `epochs: !ref <epoch_counter>` there; add an "
            "optimizer in `init_optimizers`: `self.checkpointer.add_recoverable(NAME, OPTIMIZER)`.",
        )


def _first_of(planned: PlannedRun, tensors: Sequence[Tensor]) -> str:
    """Name the first of some tensors, and count the others."""
    paths = (keys for keys, value in reached(planned) if value is tensors[0])
    name = next((f"`{dotted(keys)}`" for keys in paths), "a parameter outside the YAML")
    return listed([name, *tensors[1:]], max_names=1)
