"""The dry run sees what a step does, and leaves nothing behind."""

from pathlib import Path

import torch
from torch.nn.modules import module

from sbkit.check.dry_run import dry_run
from tests.check.harness import planned_run
from tests.runs import Workplace


def test_dry_run_of_a_healthy_step_trains_everything_once(
    workplace: Workplace, tmp_path: Path
) -> None:
    with planned_run(workplace, tmp_path / "run") as planned:
        assert planned.make_cpu_brain()
        random_state = torch.get_rng_state()
        seen = dry_run(planned)
        assert seen.trained == {id(p) for p in planned.require_model().parameters()}
        assert (seen.error, seen.created, seen.unsaved) == (None, [], [])
        assert dry_run(planned) is seen
        assert torch.equal(torch.get_rng_state(), random_state)
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks
