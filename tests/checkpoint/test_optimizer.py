"""An optimizer goes on with its moments, and with the hyperparameters that are declared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.integrity import write_checksums

Make = Callable[[nn.Module], Optimizer]


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3).to(model.weight)).abs().sum().backward()
    optimizer.step()


def saved(
    folder: Path, make: Make, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Optimizer]:
    """Save after two steps, the second of another rate."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = make(model)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    step(model, optimizer)
    Checkpointer(folder, recoverables={"model": model, "optimizer": optimizer}).save_checkpoint()
    return model, optimizer


def recovered(
    folder: Path, make: Make, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = make(model)
    parts = {"model": model, "optimizer": optimizer}
    assert Checkpointer(folder, recoverables=parts).recover_if_possible() is not None
    return model, optimizer


def over(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **{"lr": 0.1, **options})


def in_two_groups(model: nn.Module) -> Optimizer:
    weight, bias = model.parameters()
    return AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(
    "make",
    [
        over(Adam),
        over(AdamW),
        over(SGD, momentum=0.9),
        over(SGD),
        in_two_groups,
    ],
)
def test_the_same_optimizer_goes_on_bit_for_bit(
    tmp_path: Path, make: Make, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = saved(tmp_path, make, dtype)
    again, other = recovered(tmp_path, make, dtype)
    assert str(other.state_dict()) == str(optimizer.state_dict())
    for each in (model, optimizer), (again, other):
        step(*each)
    assert torch.equal(again.weight, model.weight)
    assert "declared" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (over(AdamW), over(AdamW, weight_decay=0.5), "weight_decay: 0.5, 0.01 when it was saved"),
        (over(Adam), over(Adam, betas=(0.8, 0.9)), "betas: (0.8, 0.9), (0.9, 0.999) when"),
        (over(AdamW), over(AdamW, fused=True), "fused: True, None when it was saved"),
        (over(SGD, momentum=0.9), over(SGD, momentum=0.5), "momentum: 0.5, 0.9 when"),
    ],
)
def test_what_is_declared_takes_effect_and_is_said(
    tmp_path: Path, before: Make, now: Make, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, optimizer = saved(tmp_path, before)
    model, other = recovered(tmp_path, now)
    declared = now(nn.Linear(3, 2)).param_groups[0]
    scheduled = {"params": [*model.parameters()], "lr": 0.25}
    assert {**other.param_groups[0], **scheduled} == {**declared, **scheduled}
    assert other.param_groups[0]["lr"] == 0.25  # the schedule's
    assert str(other.state_dict()["state"]) == str(optimizer.state_dict()["state"])
    out = capsys.readouterr().out
    assert "`optimizer` goes on as it is declared now" in out
    assert said in out
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


def spoiled(folder: Path, spoil: Callable[[dict[str, Any]], Any]) -> None:
    """Change what was saved of the last parameter, and the checksums with it."""
    (path,) = folder.glob("CKPT+*")
    state = torch.load(path / "optimizer.ckpt", weights_only=True)
    spoil(state["state"][1])
    torch.save(state, path / "optimizer.ckpt")
    write_checksums(path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda kept: kept.update(exp_avg=torch.zeros(1)), "`exp_avg` has shape .1. saved, .2."),
        (lambda kept: kept.update(exp_avg_sq=torch.zeros(2, 3)), "`exp_avg_sq` has shape .2, 3."),
        (lambda kept: kept.update(exp_avg=3.0), "`exp_avg` has shape .. saved"),
        (lambda kept: kept["exp_avg_sq"].fill_(torch.inf), "`exp_avg_sq` holds numbers that are"),
        (lambda kept: kept["exp_avg"].fill_(torch.nan), "`exp_avg` holds numbers that are not"),
        (lambda kept: kept["exp_avg_sq"].fill_(-1.0), "`exp_avg_sq` is below 0"),
        (lambda kept: kept["step"].fill_(-1e9), "`step` is below 0"),
        (lambda kept: kept["step"].fill_(torch.nan), "`step` holds numbers that are not"),
        (lambda kept: kept.update(exp_avg=torch.zeros(2, dtype=torch.int32)), "torch.int32"),
        (lambda kept: kept.update(exp_avg=torch.zeros(2, dtype=torch.complex64)), "complex64"),
        (
            lambda kept: kept.update(exp_avg=torch.zeros(2).to_sparse()),
            "no plain tensor|cannot be read",
        ),
        (lambda kept: kept.update(exp_avg="text"), "`exp_avg` has shape .. saved"),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_moments_that_no_training_leaves_are_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], Any], said: str, fused: bool
) -> None:
    saved(tmp_path, over(AdamW, fused=fused))
    spoiled(tmp_path, spoil)
    with pytest.raises(SbkitError, match=said):
        recovered(tmp_path, over(AdamW, fused=fused))


@pytest.mark.parametrize("rate", ["text", None, [1], -1.0, float("nan"), float("inf"), True])
@pytest.mark.parametrize("name", ["lr", "initial_lr"])
def test_a_rate_that_no_schedule_writes_is_refused(tmp_path: Path, name: str, rate: Any) -> None:
    saved(tmp_path, over(AdamW))
    (path,) = tmp_path.glob("CKPT+*")
    state = torch.load(path / "optimizer.ckpt", weights_only=True)
    state["param_groups"][0][name] = rate
    torch.save(state, path / "optimizer.ckpt")
    write_checksums(path)
    with pytest.raises(SbkitError, match=f"`{name}` is .* and no (rate|number)"):
        recovered(tmp_path, over(AdamW))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (over(AdamW), in_two_groups, r"groups of 2 parameters saved, 1 \+ 1 declared"),
        (in_two_groups, over(AdamW), r"groups of 1 \+ 1 parameters saved, 2 declared"),
        (over(AdamW), over(SGD), "amsgrad, betas, .* saved, dampening, momentum, .* declared"),
        (over(SGD, momentum=0.9), over(AdamW), "dampening, .* saved, amsgrad, betas, .* declared"),
        (over(AdamW), over(NAdam), "amsgrad, fused saved, momentum_decay declared"),
        (over(Adam), over(RMSprop), "betas.* saved, alpha"),
        (over(Adam), over(Adam, amsgrad=True), "max_exp_avg_sq"),
        (over(RMSprop), over(RMSprop, momentum=0.9), "momentum_buffer"),
    ],
)
def test_another_optimizer_is_refused_in_a_sentence(
    tmp_path: Path, before: Make, now: Make, said: str
) -> None:
    saved(tmp_path, before)
    with pytest.raises(SbkitError, match=f"must be the declared one, but is another .*{said}"):
        recovered(tmp_path, now)
