"""A dry run sees what a step does, and leaves nothing behind."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from recipes.asr.recipe import ASR
from sbkit.check.dry_run import dry_run
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


def test_a_healthy_step_trains_everything_once(planned: PlannedRun) -> None:
    assert planned.make_cpu_brain()
    random = torch.get_rng_state()
    seen = dry_run(planned)
    assert seen.trained == {id(each) for each in planned.require_model().parameters()}
    assert (seen.broken, seen.made, seen.unsaved) == (None, (), ())
    assert dry_run(planned) is seen
    assert torch.equal(torch.get_rng_state(), random)
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
