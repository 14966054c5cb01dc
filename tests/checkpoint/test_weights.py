"""Weights are those of the declared model, and are averaged over checkpoints of it alone."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.weights import check_same_model
from tests.checkpoint.saves import checkpointer, cut, line, recovered, save


def test_weights_of_another_model_are_named_with_both_sizes(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1.0)
    with pytest.raises(SbkitError, match="2 tensors differ") as caught:
        checkpointer(tmp_path, line(0.0, rows=5)).recover_if_possible()
    said = str(caught.value)
    assert str(path) in said
    assert "weight: 2x3 saved, 5x3 declared" in said
    assert "bias: 2 saved, 5 declared" in said
    with pytest.raises(SbkitError, match="bias: none saved, 2 declared; .* none declared"):
        checkpointer(tmp_path, nn.Sequential(line(0.0))).recover_if_possible()
    with pytest.raises(SbkitError, match="weight: 2x3 saved, 5x3 declared"):
        checkpointer(tmp_path, line(0.0, rows=5)).load_average(1)


def test_the_best_checkpoints_are_averaged(tmp_path: Path) -> None:
    _, damaged, *_ = save(tmp_path, 0.4, 0.1, 0.2, 0.9)
    cut(damaged / "model.ckpt")
    model = line(0.0)
    checkpointer(tmp_path, model).load_average(2, min_key="CER")
    torch.testing.assert_close(model.weight, torch.full((2, 3), 0.3))


def test_a_mean_is_rounded_once(tmp_path: Path) -> None:
    save(tmp_path, 1.0, 1.0, 2.0**24)  # in float32 that plus one is itself
    model = line(0.0)
    checkpointer(tmp_path, model).load_average(3)
    assert torch.equal(model.weight, torch.full((2, 3), (2**24 + 2) / 3))


def test_whole_numbers_are_not_averaged(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(2)
    for count in (3, 8):
        norm.num_batches_tracked.fill_(count)
        checkpointer(tmp_path, norm).save_checkpoint()
    checkpointer(tmp_path, norm).load_average(2)
    assert norm.num_batches_tracked == 8
    assert norm.num_batches_tracked.dtype == torch.int64


def test_checkpoints_of_two_models_are_not_averaged(tmp_path: Path) -> None:
    save(tmp_path, 0.4)
    checkpointer(tmp_path, line(0.1, rows=5)).save_checkpoint()
    with pytest.raises(SbkitError, match="bias: 2 saved, 5 declared"):
        checkpointer(tmp_path, line(0.0, rows=5)).load_average(2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2, 3, dtype=torch.int32), "weight: 2x3 int32 saved"),
        (torch.ones(2, 3, dtype=torch.complex64), "weight: 2x3 complex saved"),
    ],
)
def test_weights_of_another_kind_are_refused(value: torch.Tensor, said: str) -> None:
    wanted = line(0.0).state_dict()
    with pytest.raises(SbkitError, match=said):
        check_same_model({**wanted, "weight": value}, wanted, of="a file")
    check_same_model({name: each.half() for name, each in wanted.items()}, wanted, of="a file")


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    save(tmp_path, math.nan)
    with pytest.raises(SbkitError, match="Weights must be finite, but weight in .* 6 of 6"):
        recovered(tmp_path)
