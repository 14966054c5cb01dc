"""The gradient of a step is that of the mean over its labels, clipped by one norm."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from sbkit.machine.gradients import clip, divide_once, with_gradient


def parts() -> tuple[nn.Linear, nn.Linear, list[SGD]]:
    """Make two layers in three parameter groups of two optimizers."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3), nn.Linear(3, 1)
    groups = [{"params": [first.weight]}, {"params": [first.bias], "lr": 0.5}]
    return first, second, [SGD(groups, lr=0.1), SGD(second.parameters(), lr=0.1)]


def test_sums_over_micro_batches_become_the_mean_over_all_labels() -> None:
    first, second, optimizers = parts()
    inputs, counts = torch.randn(6, 4), torch.tensor([3, 1, 7, 2, 5, 4])
    labels = torch.zeros((), dtype=torch.int64)
    for rows in (slice(0, 1), slice(1, 6)):
        sums = second(first(inputs[rows])).squeeze(1).square() * counts[rows]
        sums.sum().backward()
        labels += counts[rows].sum()
    divide_once(optimizers, labels)
    mean = (second(first(inputs)).squeeze(1).square() * counts).sum() / 22
    wanted = torch.autograd.grad(mean, [*first.parameters(), *second.parameters()])
    for parameter, grad in zip(with_gradient(optimizers), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_a_step_without_a_label_stays_finite() -> None:
    first, second, optimizers = parts()
    (0 * second(first(torch.randn(2, 4))).sum()).backward()
    divide_once(optimizers, torch.tensor(0))
    assert all(not each.grad.any() for each in with_gradient(optimizers) if each.grad is not None)


def test_parameters_without_a_gradient_are_passed_over() -> None:
    _, second, optimizers = parts()
    divide_once(optimizers, torch.tensor(3))
    assert clip(optimizers, 1.0) == 0
    second(torch.randn(2, 3)).sum().backward()
    assert list(with_gradient(optimizers)) == list(second.parameters())


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_one_norm_clips_all_groups_of_all_optimizers(max_norm: float) -> None:
    first, second, optimizers = parts()
    (10 * second(first(torch.randn(2, 4)))).sum().backward()
    before = [each.grad.clone() for each in with_gradient(optimizers) if each.grad is not None]
    norm = torch.cat([grad.flatten() for grad in before]).norm()
    assert norm > 0.5
    torch.testing.assert_close(clip(optimizers, max_norm), norm)
    scale = min(1.0, max_norm / float(norm))
    for parameter, grad in zip(with_gradient(optimizers), before, strict=True):
        torch.testing.assert_close(parameter.grad, grad * scale, rtol=1e-4, atol=1e-6)
