"""Dropout drops what it says, keeps the mean, and is repeatable."""

import math

import pytest
import torch

from sbkit.models.layers import Dropout

COUNT = 400_001  # no multiple of four


@pytest.mark.parametrize("p", [0.01, 0.1, 0.15, 0.5, 0.9, 0.999])
def test_the_share_that_is_dropped_and_the_mean_that_is_kept(p: float) -> None:
    torch.manual_seed(0)
    kept = Dropout(p)(torch.ones(COUNT))
    deviation = math.sqrt(p * (1 - p) / COUNT)
    share = float((kept == 0).double().mean())
    assert abs(share - p) < 5 * deviation + 1 / 65536
    assert float(kept.double().mean()) == pytest.approx(1.0, abs=6 * deviation / (1 - p))
    survivors = kept[kept != 0]
    torch.testing.assert_close(
        survivors, torch.full_like(survivors, 1 / (1 - p)), rtol=0.02, atol=0
    )


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(COUNT - 1)) != 0).view(-1, 4).int()  # four share one draw
    patterns = (kept * torch.tensor([8, 4, 2, 1])).sum(1).bincount(minlength=16)
    expected = (COUNT - 1) / 4 / 16
    assert int((patterns - expected).abs().max()) < 5 * math.sqrt(expected)


def test_off_is_the_identity() -> None:
    x = torch.randn(5)
    assert Dropout(0.0)(x) is x
    assert Dropout(0.9).eval()(x) is x


def test_the_gradient_is_masked_as_the_output() -> None:
    x = torch.randn(1000, requires_grad=True)
    dropped = Dropout(0.3)(x)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    torch.testing.assert_close(grad * x, dropped)
    assert 0 < int((grad == 0).sum()) < 1000
