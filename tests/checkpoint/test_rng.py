"""A restored generator draws the same numbers as the saved one."""

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from sbkit.checkpoint.rng import random_state, restore_random_state

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.gauss(0, 1),
        lambda: np.random.standard_normal(),
        lambda: torch.nn.functional.dropout(torch.ones(64)).tolist(),
    ],
    ids=["python", "numpy", "torch"],
)
def test_random_state_survives_json(draw: Callable[[], object]) -> None:
    draw()  # Gaussians are drawn in pairs; the generators keep the second
    written = json.dumps(random_state(CPU))
    expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != expected
    restore_random_state(json.loads(written), CPU)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_state_of_a_gpu_is_restored() -> None:
    device = torch.device("cuda")
    written = json.dumps(random_state(device))
    expected = torch.rand(8, device=device)
    restore_random_state(json.loads(written), device)
    assert torch.equal(torch.rand(8, device=device), expected)
