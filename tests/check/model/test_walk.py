"""Whatever holds a tensor is found, by its shortest path, each once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sbkit.check.model.walk import differing, reach
from sbkit.config.document import dotted

TENSOR = torch.zeros(2)
LAYER = nn.Linear(1, 1, bias=False)


class Slotted:
    __slots__ = ("inner", "never_set")

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def method(self) -> Any:
        return self.inner


class OfClass:
    inner = TENSOR


def closed_over() -> Any:
    tensor = TENSOR
    return lambda: tensor


def hidden_in_module() -> nn.Module:
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
        (Slotted(TENSOR).method, "root.__self__.inner"),
        (OfClass(), "root.__class__.inner"),
        (closed_over(), "root.tensor"),
        (nn.ParameterList([TENSOR]), "root.0"),
        (hidden_in_module(), "root.layers.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_is_reached(root: object, path: str) -> None:
    found = [dotted(keys) for keys, each in reach({"root": root}) if isinstance(each, Tensor)]
    assert found == [path]


def test_the_shortest_path_is_yielded_and_each_object_once() -> None:
    ring: list[Any] = [LAYER]
    ring.append(ring)
    found = {dotted(keys): each for keys, each in reach({"deep": {"very": LAYER}, "ring": ring})}
    assert found["deep.very"] is LAYER
    assert sum(each is LAYER for each in found.values()) == 1
    assert sum(each is ring for each in found.values()) == 1


def test_attributes_of_two_models_are_compared() -> None:
    def model(mean: float) -> nn.Module:
        part = nn.Sequential(nn.Identity(), nn.Identity())
        part[0].table, part[1].count = {"means": [torch.tensor(mean)]}, 3
        return part

    assert differing({"CNN": model(0.0)}, {"CNN": model(1.0)}) == [("CNN", "0", "table")]
