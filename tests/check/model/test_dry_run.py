"""A dry run sees what a step does, and leaves nothing behind."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from recipes.asr.recipe import ASR
from sbkit.check.model.dry_run import dry_run, unchanged
from sbkit.check.planned_run import PlannedRun
from sbkit.config.hparams import parse_command
from tests.check.harness import healthy_workplace


@pytest.fixture(scope="module")
def planned(
    asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlannedRun]:
    folder = tmp_path_factory.mktemp("dry_run")
    workplace = healthy_workplace(asterisk_english, folder)
    command = parse_command(workplace.arguments(folder / "run"))
    with (
        patch.dict(os.environ, {"SBKIT_CACHE": str(workplace.cache)}),
        PlannedRun(*command, recipe=ASR) as planned,
    ):
        yield planned


def test_a_healthy_step_trains_everything(planned: PlannedRun) -> None:
    seen = dry_run(planned)
    assert seen.trained == {id(each) for each in planned.model.parameters()}
    assert (seen.broken, seen.foreign, seen.unsaved) == (None, (), ())
    assert dry_run(planned) is seen


def test_it_leaves_everything_as_it_was(planned: PlannedRun) -> None:
    model = planned.brain.modules
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    planned.parts.pop("dry_run", None)
    random = torch.get_rng_state()
    dry_run(planned)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_gradients_and_statistics_come_back_after_a_failure() -> None:
    norm = nn.BatchNorm1d(2)
    norm.weight.grad = torch.ones(2)
    with pytest.raises(ZeroDivisionError), unchanged(norm, torch.device("cpu")):
        norm(torch.randn(4, 2)).sum().backward()
        raise ZeroDivisionError
    assert torch.equal(norm.weight.grad, torch.ones(2))
    assert norm.running_mean is not None
    assert not norm.running_mean.any()
