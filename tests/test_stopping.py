"""A signal makes a run save and exit with its own code; the same command resumes it exactly."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from recipes.asr.brain import AsrBrain
from sbkit.base.errors import ASKED_TO_STOP
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.data import clip_decoding
from sbkit.logs.run_log import read_log
from sbkit.train import setup
from tests.runs import Workplace, read_json
from tools.prove_resume import differences

pytestmark = pytest.mark.slow

EPOCHS = 3


@pytest.fixture(scope="module")
def uninterrupted(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted")
    assert train(workplace, run) == 0
    return run


def train(workplace: Workplace, run: Path, *options: str) -> int:
    return workplace.train_here(run, f"--number_of_epochs={EPOCHS}", "--check=false", *options)


@contextmanager
def signal_after_hook(number: signal.Signals, *, hook: str, at_step: int) -> Iterator[None]:
    """Send this process a signal the first time that a hook returns at a step."""
    original = getattr(AsrBrain, hook)

    def hook_and_signal(brain: AsrBrain, *arguments: Any, **options: Any) -> Any:
        value = original(brain, *arguments, **options)
        if brain.optimizer_step == at_step and brain.stopping.signals.received is None:
            os.kill(os.getpid(), number)
        return value

    with patch.object(AsrBrain, hook, hook_and_signal):
        yield


@contextmanager
def signal_in_function(owner: Any, name: str) -> Iterator[None]:
    """Send this process SIGTERM when a function outside of the training steps is called."""
    original = getattr(owner, name)

    def signal_and_call(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    with patch.object(owner, name, signal_and_call):
        yield


STOPS = (
    (signal.SIGUSR1, "on_fit_batch_end", 1),  # after the first step
    (signal.SIGHUP, "on_fit_batch_end", 3),  # the terminal is closed
    (signal.SIGTERM, "on_stage_end", 6),  # after training of an epoch, before it is validated
    (signal.SIGTERM, "on_fit_batch_end", 7),  # within an epoch
    (signal.SIGINT, "evaluate_batch", 13),  # while it validates
)


def test_signaled_run_saves_exits_and_resumes_to_the_same_end(
    workplace: Workplace, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ""
    for number, hook, at_step in STOPS:
        handler = signal.getsignal(number)
        with signal_after_hook(number, hook=hook, at_step=at_step):
            assert train(workplace, tmp_path) == ASKED_TO_STOP
        assert signal.getsignal(number) is handler
        stopped = f"step {at_step};"
        assert stopped in capsys.readouterr().err
        assert Checkpointer(tmp_path / "checkpoints").find_checkpoint() is not None
        assert not (tmp_path / "summary.json").exists()
        earlier_log, log = log, (tmp_path / "train.log").read_text()
        assert log.startswith(earlier_log)
        assert f" {stopped}" in log.removeprefix(earlier_log)
        assert log.endswith(f" ended with exit code {ASKED_TO_STOP}\n")

    with signal_in_function(AsrBrain, "on_evaluate_start"):  # between training and test
        assert train(workplace, tmp_path) == ASKED_TO_STOP
    assert "Stopped outside of training" in capsys.readouterr().err
    assert train(workplace, tmp_path) == 0
    assert not differences(tmp_path, uninterrupted)
    summary, expected = (read_json(run / "summary.json") for run in (tmp_path, uninterrupted))
    assert summary["test"] == expected["test"]
    whole_log = (tmp_path / "train.log").read_text()
    assert whole_log.startswith(log)
    resumed = re.findall(r"Resuming after step (\d+), in epoch (\d+)", whole_log)
    assert resumed == [("1", "1"), ("3", "1"), ("6", "1"), ("7", "2"), ("13", "2")]


def test_run_resumes_at_the_same_step_with_another_accumulation(
    workplace: Workplace, uninterrupted: Path, tmp_path: Path
) -> None:
    with signal_after_hook(signal.SIGTERM, hook="on_fit_batch_end", at_step=7):  # within an epoch
        assert train(workplace, tmp_path, "--grad_accumulation_factor=1") == ASKED_TO_STOP
    assert train(workplace, tmp_path, "--grad_accumulation_factor=2") == 0
    resumed, expected = (
        [[record["step"], record["epoch"]] for record in read_log(run / "train_log.jsonl")]
        for run in (tmp_path, uninterrupted)
    )
    assert resumed == expected


@pytest.mark.parametrize(
    ("owner", "name"), [(setup, "read_document"), (clip_decoding, "read_audio")]
)
def test_signal_before_training_leaves_nothing(
    owner: Any, name: str, workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_cache = Workplace(workplace.release, tmp_path / "cache")
    run = tmp_path / "run"
    with signal_in_function(owner, name):
        assert empty_cache.train_here(run, "--check=false") == ASKED_TO_STOP
    assert capsys.readouterr().err == "Stopped outside of training; rerun the same command.\n"
    assert not [*tmp_path.rglob("*.tmp")]
    assert not [*run.glob("checkpoints/*")]
