"""What a run took is weighed while it trains, and never beyond, whatever happens in a step."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from sbkit.base.files import to_json
from sbkit.train.cost import CostRecorder

MODEL = nn.Linear(10, 10)
CPU = torch.device("cpu")
BYTES = 4 * 110  # of the model


def epoch(outcome: CostRecorder, *sizes: int) -> None:
    outcome.begin_epoch(0)
    for size in sizes:
        outcome.begin_step(size)
        MODEL(torch.ones(size, 10)).sum()
        outcome.end_step()
    outcome.end_epoch(len(sizes))


def test_the_largest_step_is_the_peak(tmp_path: Path) -> None:
    (tmp_path / "prediction.json").write_text(to_json({"peak_bytes": 1}))
    outcome = CostRecorder(MODEL, CPU)
    with outcome:
        epoch(outcome, 100, 5, 1000)
    optimizer = torch.optim.AdamW(MODEL.parameters())
    cost = outcome.summary(tmp_path, {"opt_class": optimizer})
    assert cost["prediction"] == {"peak_bytes": 1}
    assert cost["outcome"]["steps_per_epoch"] == 3
    assert cost["outcome"]["peak_bytes"] >= BYTES + 2 * 4 * 1000 * 10  # what goes in and comes out


def test_a_run_that_did_not_train_keeps_its_figures(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(to_json({"cost": {"outcome": {"peak_bytes": 3}}}))
    kept = CostRecorder(MODEL, CPU).summary(tmp_path, {})
    assert kept == {"outcome": {"peak_bytes": 3}}


def test_a_step_that_breaks_off_is_not_weighed_further() -> None:
    outcome = CostRecorder(MODEL, CPU)
    with pytest.raises(ZeroDivisionError), outcome:
        outcome.begin_step(1)
        assert is_in_torch_dispatch_mode()
        _ = 1 / 0
    assert not is_in_torch_dispatch_mode()


def test_outside_a_run_nothing_is_weighed() -> None:
    outcome = CostRecorder(MODEL, CPU)
    outcome.begin_validation()
    outcome.begin_step(1)
    assert not is_in_torch_dispatch_mode()
