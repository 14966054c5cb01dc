"""When training ends before its last epoch."""

import errno
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speechbrain.utils.epoch_loop import EpochCounterWithStopper

from sbkit.base.errors import BAD_INPUT
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.folder import newest_described
from sbkit.logs.metric import Metric, best_key
from sbkit.train.evaluation import log_validation
from sbkit.train.finished import first_best_epoch, is_finished
from sbkit.train.metrics import TrainingMetrics
from sbkit.train.scoring import BEST_EPOCH, Scoring
from tests.runs import Workplace, make_workplace

LOWER, HIGHER = {"CER": Metric()}, {"accuracy": Metric(lower_is_better=False)}


@pytest.mark.parametrize("metrics", [LOWER, HIGHER])
def test_epochs_are_counted_from_the_best(metrics: dict[str, Metric], tmp_path: Path) -> None:
    """An equal one is no better, however few checkpoints are kept; NaN is worse than all."""
    keeper, key = Checkpointer(tmp_path / "checkpoints"), best_key(metrics)
    figures, since = (math.nan, 0.7, 0.5, 0.5, math.nan, 0.4, 0.7, 0.4), []
    for epoch, figure in enumerate(figures, start=1):
        value = figure if key.min_key else 1 - figure
        first = first_best_epoch(keeper, key, epoch=epoch, value=value)
        keeper.save_and_keep_only(
            meta={key.name: value, "epoch": epoch, BEST_EPOCH: first},
            num_to_keep=1,
            **{("min_keys" if key.min_key else "max_keys"): [key.name]},
        )
        since.append(epoch - first)
        for patience in (1, 2, 3):
            stopped = is_finished(tmp_path, number_of_epochs=99, patience=patience)
            assert stopped is (since[-1] >= patience)
    assert since == [0, 0, 0, 1, 2, 0, 1, 2]
    assert is_finished(tmp_path, number_of_epochs=8)
    assert not is_finished(tmp_path, number_of_epochs=9)


def test_speechbrains_counter_with_a_stopper_is_told_the_first_metric(tmp_path: Path) -> None:
    counter = EpochCounterWithStopper(limit=9, limit_to_stop=2, limit_warmup=0, direction="min")

    class Validated(Scoring):
        metrics = LOWER
        optimizer_step, checkpointer = 1, Checkpointer(tmp_path)
        _training_metrics = TrainingMetrics(torch.device("cpu"))

        def measure(self, results: Sequence[Any]) -> dict[str, float]:
            return {"CER": np.float32(0.5)}

        def _declared(self, name: str, default: Any) -> Any:
            return {"epoch_counter": counter}.get(name, default)

    for epoch in counter:
        log_validation(Validated(), {}, 1.0, epoch)
    assert counter.current == 3
    newest = newest_described(tmp_path)
    assert newest is not None
    assert newest.meta["CER"] == 0.5


@pytest.mark.slow
def test_a_run_that_went_on_and_was_ended_in_its_test_is_tested_again(
    asterisk_english: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of the shorter run are not kept as those of the longer one."""
    workplace: Workplace = make_workplace(asterisk_english, tmp_path)
    summary = tmp_path / "run" / "summary.json"
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=1") == 0
    assert summary.is_file()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "disk")

    with monkeypatch.context() as context:
        context.setattr("sbkit.train.brain.Brain.evaluate", fail)
        assert workplace.train_here(tmp_path / "run", "--number_of_epochs=2") == BAD_INPUT
    assert not summary.exists()
    assert workplace.train_here(tmp_path / "run", "--number_of_epochs=2") == 0
    assert summary.is_file()
