"""Everything that can be reached from some objects, each once, by its shortest path.

The walk follows modules, containers, partials and attributes. What it does not reach, such as what
a closure learns, is found by the dry run.

Ownership: whatever holds parameters is inside the one ModuleList.

What is outside it stays on the CPU, in no optimizer and in no checkpoint (SpeechBrain #2804).

Parts of the model that no step trains.
"""

import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from logging import Logger
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from sbkit.base.messages import listed, plural
from sbkit.check.finding import Finding
from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Keys, dotted

NAME = "reached"
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
LEAVES = (
    *(str, bytes, int, float, complex, types.NoneType, types.ModuleType, type),
    *(torch.dtype, torch.device, np.ndarray, np.generic, Logger),
    *(Dataset, DataLoader, Sampler),  # data: a million rows, and none of them is learned
)


def reached(planned: PlannedRun) -> list[tuple[Keys, object]]:
    """Return all that is reached from a run's hparams and, if there is one, from its Brain."""
    roots = dict(planned.build_hparams().items())
    with suppress(MissingPartError):
        roots["brain"] = planned.make_cpu_brain()
    return planned.take(NAME, lambda: list(reach(roots)))


def reach(roots: Mapping[str, object]) -> Iterator[tuple[Keys, object]]:
    """Yield breadth first, so that the path of an object is its shortest."""
    waiting: deque[tuple[Keys, object]] = deque(((name,), root) for name, root in roots.items())
    seen: dict[int, object] = {}  # keeps what it has seen, or an id would come twice
    while waiting:
        keys, holder = waiting.popleft()
        if id(holder) in seen:
            continue
        seen[id(holder)] = holder
        yield keys, holder
        for name, child in children(holder):
            if not isinstance(child, LEAVES):
                waiting.append(((*keys, name), child))


def children(holder: object) -> Iterator[tuple[str | int, object]]:
    """Yield what an object holds, with its name there."""
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


OWNERSHIP_CHECK = "ownership"


def check_ownership(planned: PlannedRun) -> Iterator[Finding]:
    """Find what the ModuleList does not own."""
    at = dict(reached(planned))
    for holder, parameters in _unowned(planned).items():
        fix = f"Add `!ref <{holder[0]}>` to the list of `model`, or take it out."
        if isinstance(at[holder], list | tuple | dict) or holder[0] not in planned.document.root:
            fix = f"Make `{dotted(holder)}` a torch.nn.ModuleList or a part of `model`."
        yield planned.finding(
            OWNERSHIP_CHECK,
            *(holder if holder[0] in planned.document.root else ("model",)),
            declared="every parameter must be in the one ModuleList `model`",
            effect=f"`{dotted(holder)}` holds {plural(sum(parameters), 'parameter')} outside it, "
            "on the CPU, in no optimizer and in no checkpoint",
            fix=fix,
        )
    for each, count in Counter(map(id, planned.require_model())).items():
        if count > 1:
            name = next(keys for keys, part in at.items() if id(part) == each)
            yield planned.finding(
                OWNERSHIP_CHECK,
                "model",
                declared="every part must be in the list of `model` once",
                effect=f"`{dotted(name)}` is in it {count} times",
                fix="Take all but one out of the list.",
            )


def _unowned(planned: PlannedRun) -> dict[Keys, list[int]]:
    """Count the parameters outside the list, by the largest module around them."""
    inside = {
        id(each)
        for each in (*planned.require_model().modules(), *planned.require_model().parameters())
    }
    owned = {keys for keys, each in reached(planned) if id(each) in inside}
    modules = {keys for keys, each in reached(planned) if isinstance(each, nn.Module)} - owned
    unowned: dict[Keys, list[int]] = {}
    for keys, each in reached(planned):
        if id(each) not in inside and isinstance(each, nn.Parameter):
            above = [keys[:depth] for depth in range(1, len(keys))]
            parts = [each for each in above if each in owned]
            hidden = keys[: len(parts[-1]) + 1] if parts else None  # what a part of `model` holds
            holder = hidden or next((each for each in above if each in modules), keys)
            unowned.setdefault(holder, []).append(each.numel())
    return unowned


def check_optimizers(planned: PlannedRun) -> Iterator[Finding]:
    """Find what would not be trained, and what would not be saved."""
    optimizers = planned.make_optimizers()
    grouped = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    counts = Counter(map(id, grouped))
    trainable = [each for each in planned.require_model().parameters() if each.requires_grad]
    owned = set(map(id, planned.require_model().parameters()))
    for wrong, effect in (
        ([each for each in trainable if not counts[id(each)]], "in none: never trained"),
        ([each for each in trainable if counts[id(each)] > 1], "in more than one: stepped twice"),
        ([each for each in grouped if id(each) not in owned], "in one, but outside the model"),
    ):
        if wrong:
            yield planned.finding(
                OWNERSHIP_CHECK,
                "opt_class",
                declared="every parameter of the model must be in one group of the optimizer",
                effect=f"{_several(planned, wrong)} would be {effect}",
                fix="Give each parameter of `model` to one optimizer, and no others.",
            )
    yield from _unsaved(planned, planned.make_cpu_brain().checkpointer, optimizers)


def _unsaved(planned: PlannedRun, checkpointer: Any, optimizers: list[Any]) -> Iterator[Finding]:
    """Find what of the model, the epochs and the optimizers the checkpointer does not save."""
    recoverables: dict[str, Any] = getattr(checkpointer, "recoverables", {})
    modules = [each for each in recoverables.values() if isinstance(each, nn.Module)]
    saved = {id(each) for part in modules for each in (*part.parameters(), *part.buffers())}
    tensors = (*planned.require_model().parameters(), *planned.require_model().buffers())
    missing = [each for each in tensors if id(each) not in saved]
    known = set(map(id, recoverables.values()))
    wanted = (planned.build_hparams()["epoch_counter"], *optimizers)
    lost = [type(each).__name__ for each in wanted if id(each) not in known]
    if missing or lost:
        what = [*([_several(planned, missing)] if missing else []), *dict.fromkeys(lost)]
        yield planned.finding(
            OWNERSHIP_CHECK,
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
    return listed([first, *tensors[1:]], max_names=1)
