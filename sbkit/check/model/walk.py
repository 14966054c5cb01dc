"""Everything that can be reached from some objects, each once, by its shortest path.

The walk follows modules, containers, attributes, slots, partials, bound methods, closures, and the
attributes of classes.
"""

import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from logging import Logger
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from sbkit.check.planned_run import MissingPartError, PlannedRun
from sbkit.config.document import Keys

NAME = "reached"
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
VALUES = (int, float, np.ndarray)
METHODS = (types.FunctionType, property, classmethod, staticmethod)
LEAVES = (
    *(str, bytes, complex, *VALUES, types.NoneType, types.ModuleType, types.BuiltinMethodType),
    *(torch.dtype, torch.device, np.generic, Logger),
    *(Dataset, DataLoader, Sampler),  # data: a million rows, and none of them is learned
)


def reached(planned: PlannedRun) -> list[tuple[Keys, object]]:
    """Return all that is reached from a run's hparams and, if there is one, from its Brain."""
    roots = dict(planned.hparams)
    with suppress(MissingPartError):
        roots["brain"] = planned.brain
    return planned.once(NAME, lambda: list(reach(roots)))


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


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[Keys]:
    """Return the attributes of modules whose numbers, arrays and tensors differ in two models."""
    old, new = _values(before), _values(after)
    changed = (keys for keys, value in new.items() if keys not in old or _differ(old[keys], value))
    modules = {keys for keys, each in reach(after) if isinstance(each, nn.Module)}
    found: dict[Keys, None] = {}
    for keys in changed:
        depth = next((d for d in range(len(keys) - 1, 0, -1) if keys[:d] in modules), 0)
        found[keys[: depth + 1]] = None
    return list(found)


def _values(roots: Mapping[str, object]) -> dict[Keys, object]:
    return {
        (*keys, name): child
        for keys, holder in reach(roots)
        for name, child in children(holder)
        if isinstance(child, (Tensor, *VALUES))
    }


def _differ(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or not torch.equal(one, other.to(one))
    return not np.array_equal(one, other)  # type: ignore[arg-type]


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
        case types.MethodType():
            yield "__self__", holder.__self__
        case types.FunctionType():
            cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
            filled = ((name, cell) for name, cell in cells if cell != types.CellType())
            yield from ((name, cell.cell_contents) for name, cell in filled)
        case type():
            inside = (each for each in vars(holder).items() if not each[0].startswith("__"))
            yield from ((name, each) for name, each in inside if not isinstance(each, METHODS))
            return
    yield from _attributes(holder)


def _attributes(holder: object) -> Iterator[tuple[str, object]]:
    attributes: dict[str, Any] = getattr(holder, "__dict__", {})
    for name, value in list(attributes.items()):
        if not (isinstance(holder, nn.Module) and name in MODULE_TABLES):
            yield name, value
    for kind in type(holder).__mro__[:-1]:
        yield "__class__", kind  # walked once, however many objects are of it
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(holder, name) and name not in ("__dict__", "__weakref__"):
                yield name, getattr(holder, name)
