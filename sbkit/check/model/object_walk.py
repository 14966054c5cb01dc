"""What can be reached from some objects, each once, by its shortest path.

The way leads through modules, containers, attributes, properties and slots, partials, bound
methods, weak references, generators, closures, defaults, and what a class or a function finds
around it.
"""

import types
import weakref
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
LEAVES = (
    *(str, bytes, int, float, complex, types.NoneType, types.ModuleType),
    *(types.BuiltinMethodType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(torch.dtype, torch.device, np.ndarray, np.generic, Logger),
    *(Dataset, DataLoader, Sampler),  # data: a million rows, and none of them is learned
)

Child = tuple[str | int, object]


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


def children(holder: object) -> Iterator[Child]:
    """Yield what an object holds, with its name there."""
    match holder:
        case Tensor():
            return
        case nn.Module():
            yield from (item for table in MODULE_TABLES for item in vars(holder)[table].items())
        case Mapping():
            yield from ((str(key), value) for key, value in list(holder.items()))
            yield from ((str(key), key) for key in list(holder))
        case list() | tuple() | set() | frozenset() | deque():
            yield from enumerate(holder)
        case partial():
            yield from {"func": holder.func, "args": holder.args, **holder.keywords}.items()
        case staticmethod() | classmethod():
            yield "__func__", holder.__func__
        case types.MethodType():
            yield from (("__self__", holder.__self__), ("__func__", holder.__func__))
        case types.FunctionType():
            yield from _of_function(holder)
        case property():
            yield "fget", holder.fget
        case weakref.ReferenceType():
            yield "()", holder()
        case types.GeneratorType():
            yield from (holder.gi_frame.f_locals if holder.gi_frame else {}).items()
        case type():
            yield from _of_class(holder)
    yield from _of_object(holder)


def _of_function(function: types.FunctionType) -> Iterator[Child]:
    """Yield what a function closes over, defaults to, and finds in its file."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    around = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    yield from (
        (name, value)
        for name, value in around.items()
        if isinstance(value, Tensor | nn.Module | partial | dict | list | tuple)
    )


def _of_class(kind: type) -> Iterator[Child]:
    for name, value in list(vars(kind).items()):
        if isinstance(value, types.FunctionType) or not name.startswith("__"):
            yield name, value


def _of_object(holder: object) -> Iterator[Child]:
    if isinstance(holder, type):
        return
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
