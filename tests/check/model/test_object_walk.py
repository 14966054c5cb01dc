"""Whatever holds a tensor is found, by its shortest path, each once."""

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sbkit.check.model.object_walk import reach
from sbkit.config.document import dotted

TENSOR = torch.zeros(2)
LAYER = nn.Linear(1, 1, bias=False)


@dataclass
class Record:
    inner: Any = field(default=None)


class Slotted:
    __slots__ = ("inner", "never_set")

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def method(self) -> Any:
        return self.inner


class OfClass:
    inner = TENSOR


class InMethod:
    def method(self) -> Any:
        return LAYER


class InProperty:
    made = property(lambda self, tensor=TENSOR: tensor)  # type: ignore[misc]


IN_FILE = {"inner": TENSOR}


def closed_over() -> Any:
    tensor = TENSOR

    def inside() -> Tensor:
        return tensor

    return inside


def generating(tensor: Tensor) -> Any:
    yield tensor


def by_default(tensor: Tensor = TENSOR, *, other: Tensor | None = None) -> Tensor:
    return tensor


def hidden_module() -> nn.Module:
    module = nn.Module()
    module.layers = [TENSOR]
    return module


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ({"a": [{"b": (TENSOR,)}]}, "root.a.0.b.0"),
        ({TENSOR}, "root.0"),
        (partial(linear, TENSOR), "root.args.0"),
        (partial(linear, weight=TENSOR), "root.weight"),
        (Record(TENSOR), "root.inner"),
        (Slotted(TENSOR), "root.inner"),
        (Slotted(TENSOR).method, "root.__self__.inner"),
        (OfClass(), "root.__class__.inner"),
        (closed_over(), "root.tensor"),
        (by_default, "root.0"),
        (lambda: TENSOR, "root.TENSOR"),
        (nn.ParameterList([TENSOR]), "root.0"),
        (hidden_module(), "root.layers.0"),
        (InMethod(), "root.__class__.method.LAYER.weight"),
        (InProperty(), "root.__class__.made.fget.0"),
        (lambda: IN_FILE, "root.IN_FILE.inner"),
        (weakref.ref(LAYER), "root.().weight"),
        (generating(TENSOR), "root.tensor"),
        ({LAYER: 1}, f"root.{LAYER}.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_is_reached(root: object, path: str) -> None:
    found = [dotted(keys) for keys, each in reach({"root": root}) if isinstance(each, Tensor)]
    assert found == [path]


def test_the_shortest_path_is_told_and_each_object_once() -> None:
    deep = {"very": {"deep": LAYER}}
    found = {dotted(keys): each for keys, each in reach({"deep": deep, "here": LAYER})}
    assert found["here"] is LAYER
    assert sum(each is LAYER for each in found.values()) == 1


def test_what_holds_itself_is_walked_once() -> None:
    ring: list[Any] = [TENSOR]
    ring.append(ring)
    assert [keys for keys, each in reach({"ring": ring}) if each is TENSOR or each is ring] == [
        ("ring",),
        ("ring", 0),
    ]
