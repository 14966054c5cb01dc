"""An optimizer goes on with its moments, and with the hyperparameters that are declared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer

Make = Callable[[nn.Module], Optimizer]


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3).to(model.weight)).abs().sum().backward()
    optimizer.step()


def saved(folder: Path, make: Make) -> tuple[nn.Module, Optimizer]:
    """Save after two steps, the second of another rate."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    step(model, optimizer)
    Checkpointer(folder, recoverables={"model": model, "optimizer": optimizer}).save_checkpoint()
    return model, optimizer


def recovered(folder: Path, make: Make) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = make(model)
    parts = {"model": model, "optimizer": optimizer}
    assert Checkpointer(folder, recoverables=parts).recover_if_possible() is not None
    return model, optimizer


def over(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **{"lr": 0.1, **options})


def in_two_groups(model: nn.Module) -> Optimizer:
    weight, bias = model.parameters()
    return AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], lr=0.1)


@pytest.mark.parametrize("make", [over(Adam), over(SGD, momentum=0.9), in_two_groups])
def test_the_same_optimizer_goes_on_bit_for_bit(tmp_path: Path, make: Make) -> None:
    model, optimizer = saved(tmp_path, make)
    again, other = recovered(tmp_path, make)
    assert str(other.state_dict()) == str(optimizer.state_dict())
    for each in (model, optimizer), (again, other):
        step(*each)
    assert torch.equal(again.weight, model.weight)


def test_what_is_declared_takes_effect(tmp_path: Path) -> None:
    _, optimizer = saved(tmp_path, over(Adam))
    model, other = recovered(tmp_path, over(Adam, betas=(0.8, 0.9)))
    group = other.param_groups[0]
    assert (group["betas"], group["lr"]) == ((0.8, 0.9), 0.25)  # the latter is the schedule's
    assert str(other.state_dict()["state"]) == str(optimizer.state_dict()["state"])
    step(model, other)


def test_a_schedule_keeps_what_it_wrote(tmp_path: Path) -> None:
    def cycled(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
        for _ in range(3):
            optimizer.step()
            schedule.step()
        return optimizer

    _, optimizer = saved(tmp_path, cycled)
    _, other = recovered(tmp_path, over(SGD, momentum=0.9))
    expected, group = optimizer.param_groups[0], other.param_groups[0]
    for name in ("lr", "initial_lr", "max_lr", "momentum", "max_momentum"):
        assert group[name] == expected[name], name


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            over(AdamW),
            in_two_groups,
            "must hold what training saved, .* different number of parameter",
        ),
        (over(AdamW), over(SGD), "was saved with amsgrad, betas, .* with dampening"),
    ],
)
def test_another_optimizer_is_refused_in_a_sentence(
    tmp_path: Path, before: Make, now: Make, said: str
) -> None:
    saved(tmp_path, before)
    with pytest.raises(SbkitError, match=said):
        recovered(tmp_path, now)
