"""What moves is seen to move, and what lies still is seen to meet."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbkit.check.model.watch import MoveWatch, UseWatch

MODEL = torch.ones(3)  # stands for what is on the device
CPU = torch.device("cpu")


def test_what_a_module_moves_and_what_is_made_in_place_has_moved() -> None:
    module, plain = nn.Linear(2, 2), torch.ones(2)
    with MoveWatch() as watch:
        module.to(CPU)
        made = torch.zeros(2, device=CPU)
    assert module.weight in watch
    assert made in watch
    assert plain not in watch


@pytest.mark.parametrize(
    ("use", "unmoved"),
    [
        (lambda constant: MODEL + constant, True),
        (lambda constant: torch.cat([MODEL, constant]), True),
        (lambda constant: nn.functional.linear(MODEL, constant), True),
        (lambda constant: constant.exp()[:3].abs() * MODEL, True),
        (lambda constant: MODEL * torch.maximum(constant, torch.zeros(1)), True),
        (lambda constant: MODEL + constant.to(CPU), False),
        (lambda constant: MODEL + constant.exp().to(MODEL.device), False),
        (lambda constant: MODEL + constant.type_as(MODEL), False),
        (lambda constant: torch.maximum(constant, torch.zeros(1)), False),
        (lambda constant: constant + constant, False),
        (lambda constant: MODEL + constant.sum(), False),
        (lambda constant: MODEL.new_zeros(3).copy_(constant) + MODEL, False),
        (lambda constant: len(constant) * MODEL, False),
    ],
)
def test_a_constant_is_stranded_when_it_meets_others(
    use: Callable[[Tensor], object], unmoved: bool
) -> None:
    constant = torch.ones(3)
    with UseWatch([constant], list) as watch:
        use(constant)
    assert bool(watch.unmoved) == unmoved


@pytest.mark.parametrize(
    ("use", "made"),
    [
        (lambda x: x + torch.arange(3), {"arange"}),
        (lambda x: x + torch.arange(3).to(torch.float32), {"arange"}),
        (lambda x: x.index_select(0, torch.tensor([1])), {"tensor"}),
        (lambda x: torch.arange(3)[x.long()], {"arange"}),
        (lambda x: x + torch.arange(3, device=x.device), set()),
        (lambda x: x + torch.arange(3).to(x), set()),
        (lambda x: x + torch.tensor(2.0) + torch.zeros_like(x) + x.new_ones(3), set()),
        (lambda x: x[torch.arange(2)], set()),
        (lambda x: nn.utils.rnn.pack_padded_sequence(x[:, None], torch.ones(3), True), set()),
    ],
)
def test_what_is_made_without_a_device_is_seen_to_meet_others(
    use: Callable[[Tensor], object], made: set[str]
) -> None:
    with UseWatch([], list) as watch:
        use(MODEL)
    assert {name for key, (name, _) in watch.made.items() if key in watch.unmoved} == made
