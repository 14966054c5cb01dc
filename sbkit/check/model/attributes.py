"""What modules hold beside what a checkpoint holds: numbers and tensors that are no buffers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.check.model.object_walk import MODULE_TABLES

ABSENT = object()
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
    """Copy numbers and tensors of a module that its state_dict has not."""
    plain = {
        name: value
        for name, value in vars(module).items()
        if name not in (*MODULE_TABLES, "training")
        and isinstance(value, Tensor | int | float | type(None))
    }
    unsaved = {name: module._buffers.get(name) for name in module._non_persistent_buffers_set}
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in {**plain, **unsaved}.items()
    }


def _owned(module: nn.Module) -> set[str]:
    tables = (vars(module)[table] for table in MODULE_TABLES)
    return {name for table in tables for name, value in table.items() if value is not None}


def _same(before: object, now: object) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and torch.equal(before, now.to(before))
    return type(before) is type(now) and before == now
