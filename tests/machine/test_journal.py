"""A journal that cannot be written ends the run on every rank, by one of them with the reason."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from sbkit.machine.journal import Journal
from sbkit.machine.meter import NOTHING
from sbkit.tensors.log import read_log
from sbkit.values.errors import BAD_INPUT

WHERE = {"total_epochs": 2, "total_steps": 20}


def opened(folder: Path | None, **options: int) -> Journal:
    journal = Journal(torch.device("cpu"))
    journal.open(folder, **{"resume_step": 0, **WHERE, **options})
    return journal


def test_an_epoch_is_logged_once_whenever_the_run_was_killed(tmp_path: Path) -> None:
    for within_epoch in (False, True):
        journal = opened(tmp_path, resume_step=10, within_epoch=within_epoch)
        journal.log_epoch(1, 10, dev_loss=1.0, cer=0.5, wer=0.5)
        journal.close()
    assert len(read_log(tmp_path / "train_log.jsonl")) == 1


def test_the_rank_that_cannot_write_says_why(tmp_path: Path) -> None:
    (tmp_path / "train_log.jsonl").mkdir()
    with pytest.raises(IsADirectoryError, match="train_log"):
        opened(tmp_path)


def test_the_others_leave_in_silence() -> None:
    journal = opened(None)
    with (
        patch("sbkit.machine.journal.gather_over_ranks", lambda mine: [True, mine]),
        pytest.raises(SystemExit) as left,
    ):
        journal.log_step(1, 10, NOTHING, rate=0.1, live=False)
    assert left.value.code == BAD_INPUT
    journal.close()
