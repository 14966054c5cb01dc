"""What modules hold beside what a checkpoint holds: numbers and tensors that are no buffers.

They may be in lists and mappings, in objects that are no modules, and in what classes and functions
keep between calls: attributes, defaults, closures and globals.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from sbkit.check.model.object_walk import MODULE_TABLES

ABSENT = object()
VALUES = (Tensor, np.ndarray, int, float, complex, str, bytes, NoneType)
NO_STATE = (*MODULE_TABLES, "training")
DEFAULTS = ("__defaults__", "__kwdefaults__")
Shared = type | FunctionType
Holder = nn.Module | Shared
Place = tuple[Holder, str]  # and the name of an attribute of it, or of a variable


class Attributes:
    """The attributes of some holders as they are now, to be compared with what they become."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        """Copy the attributes."""
        self._before = [(each, _held(each), _owned(each)) for each in holders]

    def made(self) -> list[Place]:
        """Return the parameters, buffers and modules that were not there, where they now are."""
        return [
            (holder, name)
            for holder, _, owned in self._before
            for name in sorted(_owned(holder) - owned)
        ]

    def changed(self) -> list[Place]:
        """Return what has another value now, or was not there."""
        return [
            (holder, name)
            for holder, before, _ in self._before
            for name, value in _held(holder).items()
            if not _same(before.get(name, ABSENT), value)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the changed ones back for a while, as they are in a model that was just loaded."""
        changed = self.changed()
        before = {id(holder): held for holder, held, _ in self._before}
        now = [(holder, name, _values(holder)[name]) for holder, name in changed]
        try:
            for holder, name in changed:
                _set(holder, name, before[id(holder)].get(name, ABSENT))
            yield
        finally:
            for place in now:
                _set(*place)


def is_torchs(shared: Shared) -> bool:
    """Return whether torch defines it, whose own books are no state of a model."""
    return str(shared.__module__).partition(".")[0] == "torch"


def _values(holder: Holder) -> dict[str, Any]:
    """Return what a holder has and no state_dict."""
    if isinstance(holder, nn.Module):
        unsaved = {name: holder._buffers.get(name) for name in holder._non_persistent_buffers_set}
        return {name: each for name, each in vars(holder).items() if name not in NO_STATE} | unsaved
    if isinstance(holder, type):
        return {name: each for name, each in vars(holder).items() if not name.startswith("__")}
    around, filled = holder.__globals__, (each for each in _cells(holder) if each[1] != CellType())
    found = {name: around[name] for name in holder.__code__.co_names if name in around}
    found |= {name: getattr(holder, name) for name in DEFAULTS}
    return found | {name: cell.cell_contents for name, cell in filled}


def _cells(function: FunctionType) -> Iterator[tuple[str, CellType]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _set(holder: Holder, name: str, value: Any) -> None:
    """Set what `_values` has, or remove it."""
    if not isinstance(holder, FunctionType) or name in DEFAULTS:
        delattr(holder, name) if value is ABSENT else setattr(holder, name, value)
    elif cell := dict(_cells(holder)).get(name):
        cell.cell_contents = value
    else:
        holder.__globals__[name] = value


def _held(holder: Holder) -> dict[str, Any]:
    """Copy what a holder has and no state_dict."""
    copies = {name: _copied(each) for name, each in _values(holder).items()}
    return {name: each for name, each in copies.items() if each is not ABSENT}


def _copied(value: Any) -> Any:
    """Copy numbers, text, arrays and tensors, also in containers and objects; ABSENT: all else."""
    leaves, form = tree_flatten(value)
    if all(isinstance(each, VALUES) for each in leaves):
        copies = (each.detach().clone() if isinstance(each, Tensor) else each for each in leaves)
        return tree_unflatten(map(copy.copy, copies), form)
    try:
        made, inside = copy.copy(value), _copied(vars(value))
        vars(made).update(inside)
    except Exception:  # whatever is raised by what cannot be copied
        return ABSENT
    return made


def _owned(holder: Holder) -> set[str]:
    tables = [vars(holder)[each] for each in MODULE_TABLES] if isinstance(holder, nn.Module) else []
    return {name for table in tables for name, value in table.items() if value is not None}


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and torch.equal(before, now.to(before))
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return np.array_equal(before, now)
    if type(before) is not type(now) or isinstance(before, VALUES):
        return type(before) is type(now) and bool(before == now)
    (one, form), (other, form_now) = map(tree_flatten, (before, now))
    if form.is_leaf():
        return _same(vars(before), vars(now))
    return form == form_now and all(map(_same, one, other))
