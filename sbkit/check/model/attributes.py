"""What modules hold beside what a checkpoint holds: numbers and tensors that are no buffers.

They may be in lists and mappings, and in objects that are no modules.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from sbkit.check.model.object_walk import MODULE_TABLES

ABSENT = object()
VALUES = (Tensor, np.ndarray, int, float, complex, str, bytes, NoneType)
NO_STATE = (*MODULE_TABLES, "training")
Place = tuple[nn.Module, str]  # a module, and the name of an attribute of it


class Attributes:
    """The attributes of modules as they are now, to be compared with what they become."""

    def __init__(self, modules: nn.Module) -> None:
        """Copy the attributes."""
        self._before = [(each, _held(each), _owned(each)) for each in modules.modules()]

    def made(self) -> list[Place]:
        """Return the parameters, buffers and modules that were not there, where they now are."""
        return [
            (module, name)
            for module, _, owned in self._before
            for name in sorted(_owned(module) - owned)
        ]

    def changed(self) -> list[Place]:
        """Return what has another value now, or was not there."""
        return [
            (module, name)
            for module, before, _ in self._before
            for name, value in _held(module).items()
            if not _same(before.get(name, ABSENT), value)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the changed ones back for a while, as they are in a model that was just loaded."""
        changed = self.changed()
        before = {id(module): held for module, held, _ in self._before}
        now = [(module, name, getattr(module, name)) for module, name in changed]
        try:
            for module, name in changed:
                value = before[id(module)].get(name, ABSENT)
                if value is ABSENT:
                    delattr(module, name)
                else:
                    setattr(module, name, value)
            yield
        finally:
            for module, name, value in now:
                setattr(module, name, value)


def _held(module: nn.Module) -> dict[str, Any]:
    """Copy what a module holds that its state_dict has not."""
    unsaved = {name: module._buffers.get(name) for name in module._non_persistent_buffers_set}
    own = {name: each for name, each in vars(module).items() if name not in NO_STATE}
    copies = {name: _copied(each) for name, each in {**own, **unsaved}.items()}
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


def _owned(module: nn.Module) -> set[str]:
    tables = (vars(module)[table] for table in MODULE_TABLES)
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
