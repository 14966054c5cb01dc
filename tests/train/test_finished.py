"""When training ends before its last epoch."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speechbrain.utils.epoch_loop import EpochCounterWithStopper

from sbkit.base.errors import BAD_INPUT
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.listing import newest_described
from sbkit.logs.metric import Metric, best_key
from sbkit.train.evaluation import log_validation
from sbkit.train.finished import (
    epochs_since_best,
    first_best_epoch,
    has_stopped_early,
    is_finished,
)
from sbkit.train.metrics import TrainingMetrics
from sbkit.train.scoring import BEST_EPOCH, Scoring
from tests.runs import Workplace, make_workplace

LOWER, HIGHER = {"CER": Metric()}, {"accuracy": Metric(lower_is_better=False)}


def run_of(folder: Path, name: str, figures: dict[int, Any]) -> Path:
    """Write the meta files of a run's checkpoints, one for each epoch."""
    for epoch, figure in figures.items():
        checkpoint = folder / "checkpoints" / f"CKPT+{epoch:02}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "CKPT.yaml").write_text(
            f"end-of-epoch: true\nepoch: {epoch}\nunixtime: {epoch}.0\n{name}: {figure}\n"
        )
    return folder


@pytest.mark.parametrize(
    ("metrics", "figures", "passed"),
    [
        (LOWER, {}, 0),
        (LOWER, {1: 0.5}, 0),
        (LOWER, {1: 0.5, 2: 0.4, 3: 0.45, 5: 0.41}, 3),
        (LOWER, {2: 0.4, 3: 0.4, 4: 0.4}, 2),  # an equal one is no better
        (LOWER, {2: 0.4, 3: ".nan"}, 1),
        (LOWER, {2: ".nan", 3: 0.4}, 0),
        (HIGHER, {1: 0.5, 2: 0.4, 3: 0.3}, 2),
        (HIGHER, {1: 0.5, 2: 0.6}, 0),
    ],
)
def test_epochs_are_counted_from_the_best(
    metrics: dict[str, Metric], figures: dict[int, Any], passed: int, tmp_path: Path
) -> None:
    run = run_of(tmp_path, next(iter(metrics)), figures)
    assert epochs_since_best(run / "checkpoints", best_key(metrics)) == passed
    for patience in (1, 2, 3, 4):
        stopped = has_stopped_early(run / "checkpoints", metrics, patience)
        assert stopped is (passed >= patience)
        assert is_finished(run, metrics, number_of_epochs=99, patience=patience) is stopped
    assert not has_stopped_early(run / "checkpoints", metrics, 0)


@pytest.mark.parametrize(("metrics", "name"), [(LOWER, "CER"), (HIGHER, "accuracy")])
def test_an_equal_figure_is_no_better_however_few_checkpoints_are_kept(
    metrics: dict[str, Metric], name: str, tmp_path: Path
) -> None:
    keeper, key = Checkpointer(tmp_path), best_key(metrics)
    since = []
    for epoch, figure in enumerate((0.7, 0.5, 0.5, 0.5, 0.4, 0.7, 0.4), start=1):
        value = figure if key.min_key else 1 - figure
        first = first_best_epoch(tmp_path, key, epoch=epoch, value=value)
        keeper.save_and_keep_only(
            meta={name: value, "epoch": epoch, BEST_EPOCH: first},
            num_to_keep=1,
            **{("min_keys" if key.min_key else "max_keys"): [name]},
        )
        since.append(epochs_since_best(tmp_path, key))
    assert since == [0, 0, 1, 2, 0, 1, 2]


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
