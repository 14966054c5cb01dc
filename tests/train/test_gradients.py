"""The gradient of a step is that of the mean over its labels, clipped for each optimizer."""

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD

from sbkit.base.errors import SbkitError
from sbkit.train.optimizer_step import (
    OptimizerStep,
    clip,
    normalize_by_tokens,
    step_unless,
    with_gradient,
)
from sbkit.train.step import as_loss


def parts() -> tuple[nn.Linear, nn.Linear, list[SGD]]:
    """Make two layers in three parameter groups of two optimizers."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3), nn.Linear(3, 1)
    groups = [{"params": [first.weight]}, {"params": [first.bias], "lr": 0.5}]
    return first, second, [SGD(groups, lr=0.1), SGD(second.parameters(), lr=0.1)]


def test_sums_over_micro_batches_become_the_mean_over_all_labels() -> None:
    first, second, optimizers = parts()
    inputs, weights = torch.randn(6, 4), torch.tensor([3, 1, 7, 2, 5, 4])
    counts = torch.zeros(2)
    for rows in (slice(0, 1), slice(1, 6)):
        sums = second(first(inputs[rows])).squeeze(1).square() * weights[rows]
        sums.sum().backward()
        counts[0] += weights[rows].sum()
    assert normalize_by_tokens(optimizers, counts) == 0
    assert counts.tolist() == [22, 0]  # it is the caller's
    mean = (second(first(inputs)).squeeze(1).square() * weights).sum() / 22
    wanted = torch.autograd.grad(mean, [*first.parameters(), *second.parameters()])
    for parameter, grad in zip(with_gradient(optimizers), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_gradients_of_several_types_are_divided_by_one_number() -> None:
    kinds = (torch.bfloat16, torch.float32, torch.complex64)
    parameters = [nn.Parameter(torch.ones(2, dtype=kind)) for kind in kinds]
    for each in parameters:
        each.grad = torch.full_like(each, 3)
    normalize_by_tokens([SGD(parameters, lr=0.1)], torch.tensor([9, 0]))
    for each in parameters:
        torch.testing.assert_close(each.grad, torch.full_like(each, 1 / 3))


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(SbkitError, match="must be dense, .* Take `sparse=True` out of it"):
        normalize_by_tokens([SGD(embedding.parameters(), lr=0.1)], torch.tensor([2, 0]))


def test_a_step_without_a_label_stays_finite() -> None:
    first, second, optimizers = parts()
    (0 * second(first(torch.randn(2, 4))).sum()).backward()
    normalize_by_tokens(optimizers, torch.tensor([0, 0]))
    assert all(not each.grad.any() for each in with_gradient(optimizers) if each.grad is not None)


def test_parameters_without_a_gradient_are_passed_over() -> None:
    _, second, optimizers = parts()
    normalize_by_tokens(optimizers, torch.tensor([3, 0]))
    assert all(clip(each, 1.0) == 0 for each in optimizers)
    second(torch.randn(2, 3)).sum().backward()
    assert list(with_gradient(optimizers)) == list(second.parameters())


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_one_norm_clips_all_groups_of_an_optimizer(max_norm: float) -> None:
    first, second, optimizers = parts()
    (10 * second(first(torch.randn(2, 4)))).sum().backward()
    for optimizer in optimizers:
        parameters = list(with_gradient([optimizer]))
        before = [each.grad.clone() for each in parameters if each.grad is not None]
        norm = torch.cat([grad.flatten() for grad in before]).norm()
        assert norm > 0.5
        torch.testing.assert_close(clip(optimizer, max_norm), norm)
        scale = min(1.0, max_norm / float(norm))
        for parameter, grad in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.grad, grad * scale, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_takes_every_gradient_with_it() -> None:
    first, second, optimizers = parts()
    second(first(torch.randn(2, 4))).sum().backward()
    assert normalize_by_tokens(optimizers, torch.tensor([5.0, 2.0])) == 2
    assert all(
        each.grad.isnan().all() for each in with_gradient(optimizers) if each.grad is not None
    )
    assert not any(clip(each, 1.0).isfinite() for each in optimizers)


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "scaled"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_skipped_step_leaves_weights_and_optimizer_as_they_were(
    fused: bool, scaled: bool
) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    scaler = GradScaler("cpu", enabled=scaled)

    def step(grad: torch.Tensor) -> dict[str, torch.Tensor]:
        weight.grad = grad.clone()
        scaler.scale(torch.zeros(()))  # scalers want to have scaled something
        scaler.unscale_(optimizer)
        step_unless(~clip(optimizer, 1.0).isfinite(), optimizer, scaler)
        scaler.update()
        return {
            "weight": weight.detach().clone(),
            **{k: v.clone() for k, v in optimizer.state[weight].items()},
        }

    before = step(torch.randn(5))
    for bad in (torch.nan, torch.inf):
        after = step(torch.tensor([1.0, bad, 0.0, 1.0, 1.0]))
        assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not torch.equal(step(torch.randn(5))["weight"], before["weight"])
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "scaled"])
def test_optimizers_skip_a_step_together_and_one_without_a_gradient_is_passed_over(
    scaled: bool,
) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = [SGD([each], lr=0.1) for each in weights]
    scaler = GradScaler("cpu", enabled=scaled)
    step = OptimizerStep(nn.ParameterList(weights), torch.device("cpu"), None)

    def take(first: float) -> list[float]:
        scaler.scale(torch.zeros(()))  # scalers want to have scaled something
        for each, value in zip(weights, (first, 1.0), strict=False):
            each.grad = torch.full((2,), value)
        step.take(optimizers, scaler, max_grad_norm=0.0, number=1)
        return [each[0].item() for each in weights]

    assert take(torch.inf) == [1.0, 1.0, 1.0]
    moved = take(1.0)
    assert max(moved[:2]) < 1.0 == moved[2]


@pytest.mark.parametrize("objective", [None, 1.0, torch.ones(2), (torch.ones(1), torch.ones(1))])
def test_what_is_no_loss_is_refused(objective: object) -> None:
    with pytest.raises(SbkitError, match="`compute_objectives` must return a sbkit.models.loss"):
        as_loss(objective)
