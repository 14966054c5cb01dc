"""Matrices step by their orthogonalized momentum, vectors as AdamW steps them."""

import copy
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from sbkit.base.errors import SbkitError
from sbkit.logs.log import read_log
from sbkit.train.muon import Muon, is_matrix, multiply, orthogonal_factors
from sbkit.train.optimizer_step import step_unless
from tests.runs import ROOT, make_workplace


def of_singular_values(values: Tensor, rows: int, columns: int) -> Tensor:
    """Make a matrix of these singular values, and of random directions."""
    left = torch.linalg.qr(torch.randn(rows, len(values)))[0]
    right = torch.linalg.qr(torch.randn(columns, len(values)))[0]
    return left @ values.diag() @ right.mT


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (12, 40), (40, 12)])
def test_singular_values_become_nearly_one_and_directions_stay(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    spread = torch.logspace(0, -1.6, min(rows, columns))
    matrices = torch.stack(
        [of_singular_values(spread / spread.norm(), rows, columns), torch.zeros(rows, columns)]
    )
    became, nothing = map(multiply, orthogonal_factors(1e3 * matrices), matrices)
    assert not nothing.any()
    left, _, right = torch.linalg.svd(matrices[0], full_matrices=False)
    values = left.mT @ became @ right.mT
    torch.testing.assert_close(values, values.diagonal().diag(), atol=1e-3, rtol=0)
    assert 0.7 < values.diagonal().min() <= values.diagonal().max() < 1.3


def test_matrices_are_told_by_their_shape() -> None:
    shapes = {
        (3, 4): True,
        (3, 1, 15): True,
        (3, 4, 2): True,
        (1, 4): False,
        (4, 1): False,
        (0, 4): False,
        (4, 0): False,
        (4,): False,
        (): False,
    }
    assert {shape: is_matrix(torch.zeros(shape)) for shape in shapes} == shapes
    assert not is_matrix(torch.zeros(3, 4, dtype=torch.complex64))


def test_vectors_step_as_adamw_steps_them() -> None:
    torch.manual_seed(0)
    shapes = {(5,): torch.float32, (1, 7): torch.float32, (0, 3): torch.float32}
    shapes |= {(3, 4): torch.complex64}
    ours = [nn.Parameter(torch.randn(shape, dtype=kind)) for shape, kind in shapes.items()]
    theirs = copy.deepcopy(ours)
    mine = Muon(ours, lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    adamw = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    for _ in range(6):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        mine.step()
        adamw.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (16, 4, 3)])
def test_the_step_of_a_matrix_has_the_size_asked_for(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = Muon([weight], lr=0.01, update_rms=0.5, weight_decay=0.0)
    weight.grad = 1e-4 * torch.randn(shape)  # whatever the gradient's
    optimizer.step()
    assert weight.square().mean().sqrt().item() == pytest.approx(0.01 * 0.5, rel=1e-3)
    assert (weight * weight.grad).sum() < 0


def test_a_factor_is_used_for_as_many_steps_as_asked() -> None:
    """What is between two factors steps where the last one says, and to no other length."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(12, 30))
    optimizer = Muon([weight], lr=0.1, update_rms=0.4, weight_decay=0.0, momentum=0.0, refresh=3)
    factors = []
    for _ in range(7):
        before = weight.detach().clone()
        weight.grad = torch.randn(12, 30)
        optimizer.step()
        factor = optimizer.state[weight]["factor"]
        step = -multiply(factor, weight.grad)
        step *= 0.04 / step.square().mean().sqrt()
        torch.testing.assert_close(weight.detach() - before, step, rtol=1e-4, atol=1e-6)
        factors.append(factor.clone())
    alike = [bool((one == other).all()) for one, other in pairwise(factors)]
    assert alike == [True, True, False, True, True, False]


def test_a_restored_optimizer_goes_on_within_the_steps_of_a_factor() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 8))
    optimizer = Muon([weight], lr=0.1)
    restored = nn.Parameter(torch.empty(5, 8))
    for number in range(9):
        weight.grad = torch.randn(5, 8)
        optimizer.step()
        if number == 1:
            restored.data.copy_(weight.data)
            other = Muon([restored], lr=0.1)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif number > 1:
            restored.grad = weight.grad.clone()
            other.step()
    torch.testing.assert_close(restored, weight, rtol=0, atol=0)


def test_matrices_step_where_those_of_torch_do() -> None:
    """Torch's keeps bfloat16 and other factors, hence directions that are alike, not equal."""
    torch.manual_seed(0)
    one = nn.Parameter(torch.zeros(20, 60))
    other = nn.Parameter(torch.zeros(20, 60))
    mine = Muon([one], lr=0.1, update_rms=0.2, refresh=1, weight_decay=0.0)
    torchs = torch.optim.Muon(
        [other], lr=0.1, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        one.grad = torch.randn(20, 60)
        other.grad = one.grad.clone()
        mine.step()
        torchs.step()
    assert torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.97
    assert (one.norm() / other.norm()).item() == pytest.approx(1, rel=0.25)


def test_weights_of_one_shape_step_as_each_would_alone() -> None:
    torch.manual_seed(0)
    together = [nn.Parameter(torch.randn(6, 9)) for _ in range(3)]
    alone = copy.deepcopy(together)
    optimizers = [Muon(together, lr=0.1), *(Muon([each], lr=0.1) for each in alone)]
    for one, other in zip(together, alone, strict=True):
        one.grad = torch.randn(6, 9)
        other.grad = one.grad.clone()
    together.append(nn.Parameter(torch.ones(6, 9)))  # without a gradient, it stays
    optimizers[0].add_param_group({"params": together[3:]})
    for each in optimizers:
        each.step()
    for one, other in zip(together, alone, strict=False):
        torch.testing.assert_close(one, other)
    assert (together[3] == 1).all()


def test_weights_of_one_shape_and_two_types_step_apart() -> None:
    torch.manual_seed(0)
    wide, narrow = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(6, 9).bfloat16())
    alone = copy.deepcopy(narrow)
    optimizers = [Muon([wide, narrow], lr=0.1), Muon([alone], lr=0.1)]
    for _ in range(3):
        wide.grad, narrow.grad = torch.randn_like(wide), torch.randn_like(narrow)
        alone.grad = narrow.grad.clone()
        for each in optimizers:
            each.step()
    torch.testing.assert_close(narrow, alone, rtol=0, atol=0)


def test_a_weight_whose_gradient_stays_at_zero_comes_to_rest() -> None:
    """Its average halves every 14 steps; a step of constant size would never end."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(8, 12))
    optimizer = Muon([weight], lr=0.1, weight_decay=0.0)
    weight.grad = 1e-3 * torch.randn(8, 12)
    optimizer.step()
    weight.grad = torch.zeros(8, 12)
    for _ in range(600):
        optimizer.step()
    rested = weight.detach().clone()
    for _ in range(600):  # in which the average comes to numbers that cannot be squared
        optimizer.step()
    torch.testing.assert_close(weight.detach(), rested, rtol=0, atol=1e-6)


def test_a_loaded_count_of_steps_lies_where_its_vector_does() -> None:
    """A fused kernel reads it on the device."""
    vector, there = (nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "meta"))
    optimizers = [Muon([each], lr=0.1) for each in (vector, there)]
    vector.grad = torch.ones(3)
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[1].state[there]["step"].device == there.device


@pytest.mark.parametrize(
    ("argument", "value"),
    [("lr", -0.1), ("momentum", 1.0), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9)), ("eps", -1.0)],
)
def test_an_argument_that_would_step_nowhere_is_refused(argument: str, value: object) -> None:
    settings: dict[str, Any] = {"lr": 0.1, argument: value}
    with pytest.raises(SbkitError, match=f"`{argument}.* must be a number"):
        Muon([nn.Parameter(torch.ones(2))], **settings)


@pytest.mark.parametrize("taken_before", [0, 2])
def test_a_skipped_step_leaves_everything_as_it_is(taken_before: int) -> None:
    """As GradScaler asks of a fused optimizer: the gradient is NaN, and the host never looks."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    plain = copy.deepcopy(ours)
    # The steps of a factor are counted on the host, a skipped one, too: one factor for each step.
    with_skips, without = Muon(ours, lr=0.1, refresh=1), Muon(plain, lr=0.1, refresh=1)
    for number in range(taken_before + 3):
        skipped = number == taken_before
        for one, other in zip(ours, plain, strict=True):
            one.grad = torch.full_like(one, torch.nan) if skipped else torch.randn_like(one)
            other.grad = one.grad.clone()
        step_unless(torch.tensor(skipped), with_skips, GradScaler(enabled=False))
        if not skipped:
            step_unless(torch.tensor(False), without, GradScaler(enabled=False))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_scaled_gradient_is_divided_by_its_scale() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    plain = copy.deepcopy(ours)
    scaler = GradScaler("cpu", init_scale=1024.0)
    for parameters, scale in ((ours, True), (plain, False)):
        optimizer = Muon(parameters, lr=0.1)
        for seed in range(3):
            loss = sum(
                (each * torch.arange(1, each.numel() + 1).view_as(each) * (seed - 1.5)).sum()
                for each in parameters
            )
            optimizer.zero_grad()
            torch.autograd.backward(scaler.scale(loss) if scale else loss)
            if scale:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_a_yaml_takes_it_in_place_of_adamw(asterisk_english: Path, tmp_path: Path) -> None:
    """As README says; the check before the run, and checkpoints, are those of any optimizer."""
    text = (ROOT / "hparams" / "ctc.yaml").read_text(encoding="utf-8")
    arguments = "    lr: !ref <lr>\n    weight_decay: !ref <weight_decay>\n"
    muon = f"opt_class: !name:sbkit.train.muon.Muon\n{arguments}"
    yaml = tmp_path / "muon.yaml"
    yaml.write_text(re.sub(r"^opt_class: (.+\n)(    .+\n)+", muon, text, flags=re.M))
    workplace = make_workplace(asterisk_english, tmp_path / "here")
    run = tmp_path / "run"
    assert workplace.train_here(run, "--number_of_epochs=3", "--log_every=1", yaml=str(yaml)) == 0
    losses = [each["loss"] for each in read_log(run / "train_log.jsonl") if each["kind"] == "step"]
    assert losses[-1] < losses[0]
