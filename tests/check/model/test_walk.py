"""Whatever holds a tensor is found, by its shortest path, each once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sbkit.check.model.walk import reach
from sbkit.config.document import dotted

TENSOR = torch.zeros(2)
LAYER = nn.Linear(1, 1, bias=False)


def hidden_in_module() -> nn.Module:
    module = nn.Module()
    module.layers = [TENSOR]
    return module


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ({"a": [{"b": (TENSOR,)}]}, "root.a.0.b.0"),
        (partial(linear, TENSOR), "root.args.0"),
        (partial(linear, weight=TENSOR), "root.weight"),
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
