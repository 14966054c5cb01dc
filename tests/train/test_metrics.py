"""A log that cannot be written ends the run on every rank, on one of them with the reason."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from sbkit.base.errors import BAD_INPUT
from sbkit.logs.log import read_log
from sbkit.train.metrics import ZERO, TrainingMetrics

WHERE = {"total_epochs": 2, "total_steps": 20}


def opened(folder: Path | None, **options: int) -> TrainingMetrics:
    metrics = TrainingMetrics(torch.device("cpu"))
    metrics.open(folder, **{"resume_step": 0, **WHERE, **options})
    return metrics


def test_an_epoch_is_logged_once_whenever_the_run_was_killed(tmp_path: Path) -> None:
    for within_epoch in (False, True):
        metrics = opened(tmp_path, resume_step=10, within_epoch=within_epoch)
        metrics.log_epoch(1, 10, valid_loss=1.0, values={"CER": 0.5})
        metrics.close()
    assert len(read_log(tmp_path / "train_log.jsonl")) == 1


def test_the_rank_that_cannot_write_says_why(tmp_path: Path) -> None:
    (tmp_path / "train_log.jsonl").mkdir()
    with pytest.raises(OSError, match="train_log"):
        opened(tmp_path)


def test_the_others_leave_in_silence() -> None:
    metrics = opened(None)
    with (
        patch("sbkit.distributed.ranks.gather_over_ranks", lambda mine: [True, mine]),
        pytest.raises(SystemExit) as left,
    ):
        metrics.log_step(1, 10, ZERO, rate=0.1, live=False)
    assert left.value.code == BAD_INPUT
    metrics.close()
