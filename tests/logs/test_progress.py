"""A terminal shows a bar; a file gets one plain line per epoch."""

import sys
from pathlib import Path
from typing import Any

import pytest

from sbkit.logs.handlers import log_to_screen, quiet
from sbkit.logs.metric import Metric
from sbkit.logs.progress import TrainingProgress, progress_bar
from sbkit.logs.run_log import EpochFigures, StepFigures
from tests.logs.terminal import Terminal
from tests.runs import Workplace

Captured = pytest.CaptureFixture[str]
FIGURES = ("epoch 1/2", "step 20", "loss 1.234", "250 RTFx")  # of a bar and of an epoch's line


def show_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log two points, ten steps and ten seconds apart, then validate for ten seconds.

    There remain 20 steps: 20 s of training, and 20 s of validation at the pace so far.
    """
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    progress = TrainingProgress(
        total_epochs=2,
        total_steps=40,
        metrics={"CER": Metric(), "WER": Metric()},
        clock=lambda: now,
    )
    for step in (10, 20):
        common: dict[str, Any] = {"epoch": 1, "step": step, "loss": 1.234, "rtfx": 250.0}
        progress.report_step(StepFigures(**common, learning_rate=2e-3, data_wait_share=0.03))
        now += 10
    figures = EpochFigures(**common, valid_loss=1.5, metrics={"CER": 0.321, "WER": 0.71})
    progress.report_epoch(figures)
    progress.close()


def test_file_gets_one_plain_line_per_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with log_to_screen():
        show_an_epoch(monkeypatch)
    (epoch,) = capsys.readouterr().out.splitlines()
    for figure in (*FIGURES, "valid loss 1.500", "CER 32.1 %", "WER 71.0 %", "0:00:40 left"):
        assert figure in epoch


def test_terminal_gets_bar_and_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with log_to_screen():
        show_an_epoch(monkeypatch)
    output = terminal.getvalue()
    for figure in (*FIGURES, "lr 2.0e-03", "waiting 3 %", "0:00:20 left"):
        assert figure in output
    epoch, bar = (line.rpartition("\r")[2] for line in output.split("\n"))
    assert epoch.startswith("epoch 1/2") and epoch.endswith("WER 71.0 % 250 RTFx 0:00:40 left")
    assert bar == ""


def test_progress_bar_logs_time_left_each_minute_without_terminal(capsys: Captured) -> None:
    now = 0.0
    with (
        log_to_screen(to_stderr=True),
        quiet(),
        progress_bar("testing", 8, clock=lambda: now) as advance,
    ):
        for _ in range(8):
            now += 25
            advance(1)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "testing: 38 % done, about 0:02:05 left",
        "testing: 75 % done, about 0:00:50 left",
    ]


def test_progress_bar_on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    now = 0.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    with progress_bar("testing", 8, clock=lambda: now) as advance:
        now = 25.0
        advance(4)
    assert "testing: 50 % done, about 0:00:25 left" in terminal.getvalue()


def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("RANK", "1")
    with log_to_screen():
        show_an_epoch(monkeypatch)
    assert terminal.getvalue() == ""


@pytest.mark.slow
def test_run_shows_progress_of_every_phase(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sbkit.logs.progress.LINE_SECONDS", 0.0)  # at every step
    fresh = Workplace(workplace.release, tmp_path / "cache")
    options = ("--number_of_epochs=2", "--average_checkpoints=2", "--check=True")
    assert fresh.train_here(tmp_path / "run", *options) == 0
    lines = capsys.readouterr().out.splitlines()
    ended = {line.partition(":")[0] for line in lines if ": 100 % done" in line}
    phases = {"decoding audio", "checking the run", "validating", "scoring test", "writing clips"}
    assert phases < ended
    steps = [line for line in lines if line.startswith("epoch ")]
    assert not steps[0].endswith("left") and steps[-1].endswith(" left")
