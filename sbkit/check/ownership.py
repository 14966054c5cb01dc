"""Checks of who owns a parameter: the one ModuleList, one group of an optimizer, the checkpointer.

A parameter outside the ModuleList stays on the CPU, in no optimizer and in no checkpoint
(SpeechBrain #2804). To find one, a walk visits all that can be reached from the hparams and the
Brain: modules, containers, partials and attributes. The dry run finds what the walk cannot reach,
such as a closure.
"""

import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
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


def reachable(planned: PlannedRun) -> list[tuple[Keys, object]]:
    """List every object within a run's hparams and its Brain once, with its shortest path."""
    roots = dict(planned.build_hparams().items())
    with suppress(MissingPartError):
        roots["brain"] = planned.make_cpu_brain()
    return planned.take("reachable", lambda: list(_walk(roots)))


def _walk(roots: Mapping[str, object]) -> Iterator[tuple[Keys, object]]:
    """Walk breadth first, so that shorter paths come first."""
    waiting: deque[tuple[Keys, object]] = deque(((name,), root) for name, root in roots.items())
    seen: dict[int, object] = {}  # keeps each object alive: the id of a freed one is used again
    while waiting:
        path, parent = waiting.popleft()
        if id(parent) in seen:
            continue
        seen[id(parent)] = parent
        yield path, parent
        for name, child in _children(parent):
            if not isinstance(child, LEAF_TYPES):
                waiting.append(((*path, name), child))


def _children(parent: object) -> Iterator[tuple[str | int, object]]:
    match parent:
        case Tensor():
            return
        case nn.Module():
            for table in MODULE_TABLES:
                yield from vars(parent)[table].items()
        case Mapping():
            yield from ((str(key), value) for key, value in list(parent.items()))
        case list() | tuple() | set() | frozenset() | deque():
            yield from enumerate(parent)
        case partial():
            yield from {"func": parent.func, "args": parent.args, **parent.keywords}.items()
    for name, value in list(getattr(parent, "__dict__", {}).items()):
        if not (isinstance(parent, nn.Module) and name in MODULE_TABLES):
            yield name, value


def check_ownership(planned: PlannedRun) -> Iterator[Finding]:
    """Find parameters outside the ModuleList, and parts that are in it twice."""
    objects, root = dict(reachable(planned)), planned.document.root
    for path, size in _count_unowned(planned).items():
        is_in_yaml, name = path[0] in root, dotted(path)
        fix = f"Add `!ref <{path[0]}>` to the list of `model`, or take it out of the YAML."
        if isinstance(objects[path], list | tuple | dict) or not is_in_yaml:
            fix = f"Make `{name}` a torch.nn.ModuleList or a part of `model`."
        yield planned.finding(
            *(path if is_in_yaml else ("model",)),
            problem=f"`{name}` holds {plural(size, 'parameter')} outside `model`, the one "
            "ModuleList: they would stay on the CPU, in no optimizer and in no checkpoint",
            fix=fix,
        )
    for part_id, count in Counter(map(id, planned.require_model())).items():
        if count > 1:
            path = next(path for path, part in objects.items() if id(part) == part_id)
            yield planned.finding(
                "model",
                problem=f"The list of `model` holds `{dotted(path)}` {count} times",
                fix="Take all but one out of the list.",
            )


def _count_unowned(planned: PlannedRun) -> Counter[Keys]:
    """Count the values of parameters outside the ModuleList, by the object to report."""
    model, objects = planned.require_model(), reachable(planned)
    owned_ids = {id(part) for part in (*model.modules(), *model.parameters())}
    owned = {path for path, part in objects if id(part) in owned_ids}
    modules = {path for path, part in objects if isinstance(part, nn.Module)} - owned
    unowned = Counter[Keys]()
    for path, parameter in objects:
        if isinstance(parameter, nn.Parameter) and path not in owned:
            unowned[_outermost_unowned(path, owned, modules)] += parameter.numel()
    return unowned


def _outermost_unowned(path: Keys, owned: Set[Keys], modules: Set[Keys]) -> Keys:
    """Return the path of the largest object to report for the parameter at a path.

    Within a part of the ModuleList it is an attribute that torch does not search, such as a list.
    Elsewhere it is the outermost module, or else the parameter itself.
    """
    ancestors = [path[:depth] for depth in range(1, len(path))]
    owners = [ancestor for ancestor in ancestors if ancestor in owned]
    if owners:
        return path[: len(owners[-1]) + 1]
    return next((ancestor for ancestor in ancestors if ancestor in modules), path)


def check_optimizers(planned: PlannedRun) -> Iterator[Finding]:
    """Find parameters that would not be trained once in a step, and state that is not saved."""
    optimizers, model = planned.make_optimizers(), planned.require_model()
    grouped = [p for opt in optimizers for group in opt.param_groups for p in group["params"]]
    counts = Counter(map(id, grouped))
    trainable = [p for p in model.parameters() if p.requires_grad]
    owned = set(map(id, model.parameters()))
    for parameters, problem in (
        ([p for p in trainable if not counts[id(p)]], "No optimizer updates"),
        ([p for p in trainable if counts[id(p)] > 1], "More than one group of parameters has"),
        ([p for p in grouped if id(p) not in owned], "Outside `model`, an optimizer updates"),
    ):
        if parameters:
            yield planned.finding(
                "opt_class",
                problem=f"{problem} {_describe_tensors(planned, parameters)}",
                fix="Give each parameter of `model` to one group of one optimizer, and no others.",
            )
    yield from _find_unsaved(planned, optimizers)


def _find_unsaved(planned: PlannedRun, optimizers: list[Optimizer]) -> Iterator[Finding]:
    """Find tensors of the model, and states of epochs and optimizers, that are not saved."""
    checkpointer, model = planned.make_cpu_brain().checkpointer, planned.require_model()
    recoverables: dict[str, object] = getattr(checkpointer, "recoverables", {})
    modules = [part for part in recoverables.values() if isinstance(part, nn.Module)]
    saved = {id(t) for part in modules for t in (*part.parameters(), *part.buffers())}
    saved |= set(map(id, recoverables.values()))
    tensors = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in saved]
    unsaved = [_describe_tensors(planned, tensors)] if tensors else []
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


def _describe_tensors(planned: PlannedRun, tensors: Sequence[Tensor]) -> str:
    """Name the first of some tensors, and count the others."""
    paths = (path for path, value in reachable(planned) if value is tensors[0])
    name = next((f"`{dotted(path)}`" for path in paths), "a parameter outside the YAML")
    return name if len(tensors) == 1 else f"{name} and {len(tensors) - 1:,} more"
