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


def test_resuming_cuts_the_log_at_the_size_in_the_checkpoint(tmp_path: Path) -> None:
    """A line of the user's stays if it was there before; neither it nor half a line is an error."""
    path = tmp_path / "train_log.jsonl"
    first = RunLog(tmp_path)
    first.write(step_figures(10))
    with path.open("a") as file:
        file.write('{"note": "moved to the new GPU"}\nnull\n')
    first.write(step_figures(20))
    saved, kept = first.size, path.read_bytes()
    first.write(EpochFigures(epoch=1, step=20, loss=2.0, rtfx=200.0))  # killed in its save
    first.write(step_figures(30))
    first.close()
    with path.open("a") as file:
        file.write('{"note": 2}\n{"kind": "step", "step": 4')  # the kill

    whole = path.read_bytes()
    assert saved == len(kept)
    assert [record["step"] for record in read_log(path)] == [10, 20, 20, 30]
    sleep(1)  # TensorBoard orders files of one second by a counter, as text: 99 after 100
    resumed = RunLog(tmp_path, size=saved, step=20)
    assert path.read_bytes() == whole  # a log that is only opened stays
    for loss in (1.0, 0.5):
        resumed.write(step_figures(30, loss=loss))
    resumed.close()
    assert path.read_bytes().startswith(kept)
    losses = [(10, 2.0), (20, 2.0), (30, 1.0), (30, 0.5)]
    assert [(record["step"], record["loss"]) for record in read_log(path)] == losses
    assert path.read_text().count("\n") == 6
    assert _tensorboard(tmp_path, "step/loss") == losses


def test_log_shorter_than_in_the_checkpoint_is_continued_and_a_new_run_drops_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train_log.jsonl"
    for size, count in ((99, 1), (10_000, 2), (0, 1)):
        run_log = RunLog(tmp_path, size=size)
        run_log.write(SplitFigures(epoch=0, step=0, split="dev\u2028other", metrics={"WER": 1.0}))
        run_log.close()
        assert [record["split"] for record in read_log(path)] == ["dev\u2028other"] * count


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
