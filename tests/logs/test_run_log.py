"""The log of a run survives kills and resumes."""

import json
import math
from importlib import import_module
from pathlib import Path
from time import sleep
from types import MappingProxyType

import numpy as np
import pytest

from sbkit.base.errors import ConfigError
from sbkit.logs import curves
from sbkit.logs import run_log as run_log_module
from sbkit.logs.run_log import EpochFigures, RunLog, SplitFigures, StepFigures, read_log
from tests.shortage import largest_file


def step_figures(step: int, *, loss: float = 2.0, **figures: float) -> StepFigures:
    return StepFigures(
        epoch=1, step=step, loss=loss, learning_rate=0, rtfx=0, data_wait_share=0, metrics=figures
    )


def test_lines_are_json_and_on_disk_at_once(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path)
    run_log.write(step_figures(10, loss=math.nan, ctc_loss=1.5))
    run_log.write(EpochFigures(epoch=1, step=10, loss=2.0, rtfx=200.0, metrics={"CER": 0.5}))
    run_log.write(SplitFigures(epoch=1, step=10, split="test", metrics={"WER": 0.8}))
    lines = (tmp_path / "train_log.jsonl").read_text().splitlines()  # while the log is still open
    run_log.close()
    assert _tensorboard(tmp_path, "test/WER") == [(10, pytest.approx(0.8))]
    step, epoch, test = map(json.loads, lines)
    assert (step["kind"], step["step"], step["ctc_loss"], step["loss"]) == ("step", 10, 1.5, None)
    assert (epoch["kind"], epoch["CER"], epoch["valid_loss"]) == ("epoch", 0.5, None)
    assert (test["kind"], test["WER"]) == ("test", 0.8)


def test_resuming_drops_records_after_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    first = RunLog(tmp_path)
    for step in (10, 20, 30):
        first.write(step_figures(step))
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 4')  # the kill

    assert [record["step"] for record in read_log(path)] == [10, 20, 30]
    sleep(1)  # TensorBoard orders files of one second by a counter, as text: 99 after 100
    resumed = RunLog(tmp_path, resume_step=20)
    resumed.write(step_figures(30, loss=1.0))
    resumed.close()
    losses = [(10, 2.0), (20, 2.0), (30, 1.0)]
    records = map(json.loads, path.read_text().splitlines())  # each line is complete
    assert [(record["step"], record["loss"]) for record in records] == losses
    assert _tensorboard(tmp_path, "step/loss") == losses


@pytest.mark.parametrize(("before_validation", "expected"), [(False, [1, 2]), (True, [1])])
def test_resuming_before_validation_drops_record_of_that_epoch(
    before_validation: bool, expected: list[int], tmp_path: Path
) -> None:
    """The run was killed between the epoch's line and its checkpoint, and validates again."""
    run_log = RunLog(tmp_path)
    for epoch, step in ((1, 10), (2, 20), (3, 30)):
        run_log.write(step_figures(step))
        run_log.write(EpochFigures(epoch=epoch, step=step, loss=2.0, rtfx=200.0))
    run_log.close()
    RunLog(tmp_path, resume_step=20, before_validation=before_validation).close()
    records = read_log(tmp_path / "train_log.jsonl")
    assert [record["epoch"] for record in records if record["kind"] == "epoch"] == expected
    assert [record["step"] for record in records if record["kind"] == "step"] == [10, 20]


def test_new_run_drops_all_records_and_ignores_foreign_lines(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path)
    run_log.write(SplitFigures(epoch=0, step=0, split="dev\u2028other", metrics={"WER": 1.0}))
    run_log.close()
    path = tmp_path / "train_log.jsonl"
    with path.open("a") as file:
        file.write("null\n")
    assert [record["split"] for record in read_log(path)] == ["dev\u2028other"]
    RunLog(tmp_path, keep_test=True).close()
    assert read_log(path) == []


def test_metrics_may_be_numbers_of_numpy_but_replace_no_figure(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path)
    metrics = MappingProxyType({"WER": np.float32(0.5)})
    run_log.write(EpochFigures(epoch=1, step=10, loss=2.0, rtfx=200.0, metrics=metrics))
    clashing = EpochFigures(epoch=2, step=20, loss=2.0, rtfx=200.0, metrics={"loss": 1.0})
    with pytest.raises(ConfigError, match="A metric may not be called loss"):
        run_log.write(clashing)
    run_log.close()
    assert _tensorboard(tmp_path, "epoch/WER") == [(10, 0.5)]


def test_full_disk_is_raised_once_and_names_file(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path)
    run_log.write(step_figures(1))
    size = (tmp_path / "train_log.jsonl").stat().st_size
    with largest_file(size), pytest.raises(OSError, match="too large") as caught:
        run_log.write(step_figures(2))
    assert caught.value.filename == str(tmp_path / "train_log.jsonl")
    with largest_file(size):
        run_log.close()  # a second error would hide the one that ends the run


def test_run_without_tensorboard_and_matplotlib_says_once_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    monkeypatch.setattr(run_log_module, "find_spec", lambda name: None)
    curves.can_draw.cache_clear()
    run_log = RunLog(tmp_path)
    run_log.write(step_figures(10))
    run_log.close()
    for _ in range(2):
        curves.draw_curves(tmp_path / "train_log.jsonl", tmp_path / "curves.png", {})
    curves.can_draw.cache_clear()
    assert [file.name for file in tmp_path.iterdir()] == ["train_log.jsonl"]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "No TensorBoard files without tensorboard",
        "No pictures without matplotlib",
    ]


def _tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")  # untyped
    events = reader.EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]
