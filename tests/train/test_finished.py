"""When training ends before its last epoch."""

import errno
import math
from pathlib import Path

import pytest

from sbkit.base.errors import BAD_INPUT
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.logs.metric import Metric, best_key
from sbkit.train.stopping import BEST_EPOCH, first_best_epoch, is_finished
from tests.runs import Workplace

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


@pytest.mark.slow
def test_a_run_that_went_on_and_was_ended_in_its_test_is_tested_again(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The results of the shorter run are kept, but not as those of the longer one."""
    summary = tmp_path / "run" / "summary.json"
    one, two = (("--check=false", f"--number_of_epochs={epochs}") for epochs in (1, 2))
    assert workplace.train_here(tmp_path / "run", *one) == 0
    of_one_epoch = summary.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "disk")

    with monkeypatch.context() as context:
        context.setattr("sbkit.train.brain.Brain.evaluate", fail)
        assert workplace.train_here(tmp_path / "run", *two) == BAD_INPUT
    assert not summary.exists()
    assert "after epoch 1 are kept as summary-1.json" in capsys.readouterr().out
    assert summary.with_name("summary-1.json").read_bytes() == of_one_epoch
    assert workplace.train_here(tmp_path / "run", *two) == 0
    assert summary.is_file()


@pytest.mark.slow
def test_a_run_that_stopped_early_stays_ended(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--lr=0.0", "--early_stopping=1", "--check=false")
    for said in ("CER has not improved for 1 epochs", "the results in"):
        assert workplace.train_here(tmp_path, *options) == 0
        out = capsys.readouterr().out
        assert said in out
        assert "epoch 3/4" not in out
