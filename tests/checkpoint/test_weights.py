"""Weights, part names and optimizers of checkpoints must fit the declared model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.weights import part_names_of_yaml
from sbkit.config.document import read_document
from sbkit.export.export import part_facts
from sbkit.tasks.asr.task import AsrTask
from tests.checkpoint.saves import checkpointer, cut, line, recovered, save


def test_weights_of_other_model_are_refused_with_both_shapes(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1.0)
    with pytest.raises(SbkitError, match="2 tensors differ") as caught:
        checkpointer(tmp_path, line(0.0, rows=5)).recover_if_possible()
    message = str(caught.value)
    assert str(path) in message
    assert "weight: 2x3 instead of 5x3" in message
    assert "bias: 2 instead of 5" in message
    with pytest.raises(SbkitError, match="bias: none instead of 2; .* instead of none"):
        checkpointer(tmp_path, nn.Sequential(line(0.0))).recover_if_possible()
    with pytest.raises(SbkitError, match="weight: 2x3 instead of 5x3"):
        checkpointer(tmp_path, line(0.0, rows=5)).load_average(1)


def test_best_checkpoints_are_averaged(tmp_path: Path) -> None:
    _, damaged, *_ = save(tmp_path, 0.4, 0.1, 0.2, 0.9)
    cut(damaged / "model.ckpt")
    model = line(0.0)
    checkpointer(tmp_path, model).load_average(2, min_key="CER")
    torch.testing.assert_close(model.weight, torch.full((2, 3), 0.3))


def test_averaged_weights_are_rounded_once(tmp_path: Path) -> None:
    save(tmp_path, 1.0, 1.0, 2.0**24)  # in float32 that plus one is itself
    model = line(0.0)
    checkpointer(tmp_path, model).load_average(3)
    assert torch.equal(model.weight, torch.full((2, 3), (2**24 + 2) / 3))


def test_integers_are_not_averaged(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(2)
    for count in (3, 8):
        norm.num_batches_tracked.fill_(count)
        checkpointer(tmp_path, norm).save_checkpoint()
    checkpointer(tmp_path, norm).load_average(2)
    assert norm.num_batches_tracked == 8
    assert norm.num_batches_tracked.dtype == torch.int64


class Buffer(nn.Module):
    """A module of one buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)


@pytest.mark.parametrize(
    ("saved", "declared", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 3), "2x3 int32 instead of 2x3"),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2), "2 complex instead of 2"),
        (torch.ones(()), torch.ones(1), "scalar instead of 1"),
    ],
)
def test_tensor_of_other_type_or_shape_is_refused(
    tmp_path: Path, saved: torch.Tensor, declared: torch.Tensor, message: str
) -> None:
    checkpointer(tmp_path, Buffer(saved)).save_checkpoint()
    with pytest.raises(SbkitError, match=f"value: {message}"):
        checkpointer(tmp_path, Buffer(declared)).recover_if_possible()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_weights_are_refused(tmp_path: Path, value: float) -> None:
    save(tmp_path, value)
    message = "Weights must be finite, but 6 of the 6 values of weight in .* are not"
    with pytest.raises(SbkitError, match=message):
        recovered(tmp_path)
    with pytest.raises(SbkitError, match=message):
        checkpointer(tmp_path, line(0.0)).load_average(1)


def test_infinite_buffer_of_another_float_type_is_loaded(tmp_path: Path) -> None:
    checkpointer(tmp_path, Buffer(torch.tensor([-math.inf]).half())).save_checkpoint()
    mask = Buffer(torch.zeros(1))
    assert checkpointer(tmp_path, mask).recover_if_possible() is not None
    assert mask.value == -math.inf


PARTS = """
compute_features: !new:sbkit.audio.fbank.Fbank
CNN: &cnn !new:torch.nn.Linear [80, 4]
Transformer: &transformer !new:torch.nn.Identity
ctc_lin: &ctc_lin !new:torch.nn.Linear [4, 9]
"""


@pytest.mark.parametrize(
    "listed", ["- [*cnn, *transformer, *ctc_lin]", "  modules: [*cnn, *transformer, *ctc_lin]"]
)
def test_part_names_by_position_or_by_name(listed: str, tmp_path: Path) -> None:
    file = tmp_path / "resolved.yaml"
    file.write_text(f"{PARTS}\nmodel: !new:torch.nn.ModuleList\n{listed}\n")
    root = read_document(file).root
    assert part_names_of_yaml(root) == ["CNN", "Transformer", "ctc_lin"]
    plain = part_facts(root, {}, AsrTask(), ["CNN", "Transformer", "ctc_lin"])
    assert plain["model"] == ["CNN", "Transformer", "ctc_lin"]
    identity = {"new": "torch.nn.modules.linear.Identity", "arguments": {}}
    assert plain["parts"]["Transformer"] == identity


Make = Callable[[nn.Module], Optimizer]


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3).to(model.weight)).abs().sum().backward()
    optimizer.step()


def saved_optimizer(folder: Path, make: Make) -> tuple[nn.Module, Optimizer]:
    """Save after two steps, the second of another rate."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model)
    checkpointer = Checkpointer(folder, recoverables={"model": model, "optimizer": optimizer})
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    step(model, optimizer)
    checkpointer.save_checkpoint()
    return model, optimizer


def recovered_optimizer(folder: Path, make: Make) -> tuple[nn.Module, Optimizer]:
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


def test_declared_optimizer_settings_replace_saved_ones(tmp_path: Path) -> None:
    _, optimizer = saved_optimizer(tmp_path, over(Adam))
    model, other = recovered_optimizer(tmp_path, over(Adam, betas=(0.8, 0.9)))
    group = other.param_groups[0]
    assert (group["betas"], group["lr"]) == ((0.8, 0.9), 0.25)  # the latter is the schedule's
    assert str(other.state_dict()["state"]) == str(optimizer.state_dict()["state"])
    step(model, other)


def with_another_hyperparameter(model: nn.Module) -> Optimizer:
    optimizer = over(AdamW)(model)
    optimizer.param_groups[0]["cautious"] = False
    return optimizer


@pytest.mark.parametrize("is_added", [True, False])
def test_torch_may_add_or_remove_a_hyperparameter(tmp_path: Path, is_added: bool) -> None:
    before, now = over(AdamW, betas=(0.8, 0.9)), with_another_hyperparameter
    saved_optimizer(tmp_path, before if is_added else now)
    _, optimizer = recovered_optimizer(tmp_path, now if is_added else before)
    assert optimizer.param_groups[0]["betas"] == ((0.9, 0.999) if is_added else (0.8, 0.9))


def test_scheduled_optimizer_settings_are_restored(tmp_path: Path) -> None:
    """And what an optimizer counts in its group, as schedule-free ones do."""
    optimizer = SGD(nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["k"] = 0
    checkpointer = Checkpointer(tmp_path, recoverables={"optimizer": optimizer})
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
    for _ in range(3):
        optimizer.param_groups[0]["k"] += 1
        optimizer.step()
        schedule.step()
    checkpointer.save_checkpoint()
    other = SGD(nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)
    other.param_groups[0]["k"] = 0
    Checkpointer(tmp_path, recoverables={"optimizer": other}).recover_if_possible()
    expected, group = optimizer.param_groups[0], other.param_groups[0]
    for name in ("lr", "initial_lr", "max_lr", "momentum", "max_momentum", "k"):
        assert group[name] == expected[name], name


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (over(AdamW), in_two_groups, "must hold what training saved, .* different number"),
        (over(AdamW), over(SGD), "was saved with amsgrad, betas, .* with dampening"),
    ],
)
def test_other_optimizer_is_refused(tmp_path: Path, before: Make, now: Make, message: str) -> None:
    saved_optimizer(tmp_path, before)
    with pytest.raises(SbkitError, match=message):
        recovered_optimizer(tmp_path, now)
