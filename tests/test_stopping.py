"""A run that is asked to leave saves, leaves with its own code, and goes on as if nothing was."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from recipes.asr.recipe import AsrBrain
from sbkit.base.errors import ASKED_TO_STOP
from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.data import shard as decode
from sbkit.logs.run_log import read_log
from sbkit.train import run as run_steps
from tests.runs import Workplace, read_json
from tools.prove_resume import differences

pytestmark = pytest.mark.slow

EPOCHS = 3


@pytest.fixture(scope="module")
def whole(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody asked to stop."""
    run = tmp_path_factory.mktemp("whole")
    assert train(workplace, run) == 0
    return run


def train(workplace: Workplace, run: Path, *more: str) -> int:
    return workplace.train_here(run, f"--number_of_epochs={EPOCHS}", "--check=false", *more)


@contextmanager
def signalled(sent: signal.Signals, *, hook: str, at_step: int) -> Iterator[None]:
    """Send this process a signal the first time that a hook is over at a step."""
    original = getattr(AsrBrain, hook)

    def and_signal(brain: AsrBrain, *arguments: Any, **options: Any) -> Any:
        value = original(brain, *arguments, **options)
        if brain.optimizer_step == at_step and brain.signals.received is None:
            os.kill(os.getpid(), sent)
        return value

    with patch.object(AsrBrain, hook, and_signal):
        yield


@contextmanager
def signalled_in(place: tuple[Any, str], sent: signal.Signals) -> Iterator[None]:
    """Send this process a signal when something is called that comes before the training."""
    holder, name = place
    original = getattr(holder, name)

    def and_signal(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), sent)
        return original(*arguments, **options)

    with patch.object(holder, name, and_signal):
        yield


def assert_same_run(run: Path, whole: Path) -> None:
    assert not differences(run, whole)
    assert read_json(run / "summary.json")["test"] == read_json(whole / "summary.json")["test"]


STOPS = (
    (signal.SIGUSR1, "on_fit_batch_end", 1),  # after the first step
    (signal.SIGHUP, "on_fit_batch_end", 3),  # the terminal is closed
    (signal.SIGTERM, "on_stage_end", 6),  # after training of an epoch, before it is validated
    (signal.SIGTERM, "on_fit_batch_end", 7),  # within an epoch
    (signal.SIGINT, "evaluate_batch", 13),  # while it validates
)


def test_signals_save_and_leave_and_the_same_command_goes_on_to_the_same_end(
    workplace: Workplace, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ""
    for sent, hook, at_step in STOPS:
        before = signal.getsignal(sent)
        with signalled(sent, hook=hook, at_step=at_step):
            assert train(workplace, tmp_path) == ASKED_TO_STOP
        assert signal.getsignal(sent) is before
        assert f"Stopped at step {at_step}; checkpoint saved" in capsys.readouterr().out
        assert Checkpointer(tmp_path / "checkpoints").find_checkpoint() is not None
        assert not (tmp_path / "summary.json").exists()
        earlier, log = log, (tmp_path / "train.log").read_text()
        assert log.startswith(earlier)
        said = f" Stopped at step {at_step}; checkpoint saved"
        assert said in log.removeprefix(earlier)  # whatever the terminal did
        assert log.endswith(f" ended with exit code {ASKED_TO_STOP}\n")

    with signalled_in((AsrBrain, "on_evaluate_start"), signal.SIGTERM):  # between it and the test
        assert train(workplace, tmp_path) == ASKED_TO_STOP
    assert "Stopped outside of training" in capsys.readouterr().err
    assert train(workplace, tmp_path) == 0
    assert_same_run(tmp_path, whole)
    whole_log = (tmp_path / "train.log").read_text()
    assert whole_log.startswith(log)
    resumed = re.findall(r"Resuming after step (\d+), in epoch (\d+)", whole_log)
    assert resumed == [("1", "1"), ("3", "1"), ("6", "1"), ("7", "2"), ("13", "2")]


def test_a_run_goes_on_at_the_same_step_with_another_accumulation(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    with signalled(signal.SIGTERM, hook="on_fit_batch_end", at_step=7):  # within an epoch
        assert train(workplace, tmp_path, "--grad_accumulation_factor=1") == ASKED_TO_STOP
    assert train(workplace, tmp_path, "--grad_accumulation_factor=2") == 0
    ended, wanted = (
        [[each["step"], each["epoch"]] for each in read_log(run / "train_log.jsonl")]
        for run in (tmp_path, whole)
    )
    assert ended == wanted


@pytest.mark.parametrize(
    "place",
    [(run_steps, "read_knobs"), (decode, "read_audio")],  # the second in the threads that decode
    ids=lambda place: place[1],
)
def test_before_training_a_signal_leaves_at_once_and_leaves_nothing(
    place: tuple[Any, str], workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, run = Workplace(workplace.release, tmp_path / "cache"), tmp_path / "run"
    with signalled_in(place, signal.SIGTERM):
        assert own.train_here(run, "--check=false") == ASKED_TO_STOP
    sentence = "Stopped outside of training; rerun the same command.\n"
    assert capsys.readouterr().err == sentence
    assert not [*tmp_path.rglob("*.tmp")]
    assert not [*run.glob("checkpoints/*")]
