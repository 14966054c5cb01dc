"""Loss and speed of a run are added up and logged."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from sbkit.base.errors import BAD_INPUT, OtherRankError
from sbkit.base.process import exit_code
from sbkit.logs.progress import TrainingProgress
from sbkit.logs.run_log import read_log
from sbkit.models.loss import Loss
from sbkit.train.metrics import NO_TOTALS, Meter, TrainingMetrics

CPU = torch.device("cpu")


def test_meter_adds_small_sums_exactly() -> None:
    meter = Meter(CPU)
    meter.add(Loss(torch.tensor([2.0**24]), torch.tensor([1])), 0.0)
    for _ in range(100):
        meter.add(Loss(torch.tensor([1.0]), torch.tensor([1])), 0.0)
    assert meter.read().loss_sum == 2**24 + 100  # float32 would have stayed at 2**24


def test_meter_separates_waiting_from_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slow_batches() -> Iterator[int]:
        for number in range(3):
            now[0] += 4.0
            yield number

    meter = Meter(CPU)
    for _ in meter.timed(slow_batches()):
        meter.add(Loss(torch.ones(1), torch.ones(1)), 10.0)
        now[0] += 1.0
    assert list(meter.timed(iter([]))) == []
    reading = meter.read()
    assert (reading.waiting_seconds, reading.wall_seconds) == (12.0, 15.0)
    assert (reading.rtfx, reading.data_wait_share) == (2.0, 0.8)


def opened(
    folder: Path | None, *, resume_step: int = 0, before_validation: bool = False
) -> TrainingMetrics:
    metrics, progress = TrainingMetrics(CPU), TrainingProgress(total_epochs=2, total_steps=20)
    metrics.open(folder, progress, resume_step=resume_step, before_validation=before_validation)
    return metrics


def test_killed_run_logs_each_epoch_once(tmp_path: Path) -> None:
    for before_validation in (False, True):
        metrics = opened(tmp_path, resume_step=10, before_validation=before_validation)
        metrics.log_epoch(1, 10, valid_loss=1.0, values={"CER": 0.5})
        metrics.close()
    assert len(read_log(tmp_path / "train_log.jsonl")) == 1


def test_rank_that_cannot_write_its_log_raises_the_error(tmp_path: Path) -> None:
    (tmp_path / "train_log.jsonl").mkdir()
    with pytest.raises(OSError, match="train_log"):
        opened(tmp_path)


def test_other_ranks_end_with_the_same_code() -> None:
    metrics = opened(None)
    with (
        patch("sbkit.distributed.ranks.gather_over_ranks", lambda mine: [True, mine]),
        pytest.raises(OtherRankError) as raised,
    ):
        metrics.log_step(1, 10, NO_TOTALS, rate=0.1, live=False)
    assert exit_code(raised.value) == BAD_INPUT
    metrics.close()
