"""The proof that a killed run goes on to the same digits, in short; and that it sees others."""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from sbkit.checkpoint.checkpointer import Checkpointer
from sbkit.checkpoint.staging import UNFINISHED
from tests.processes import Process
from tests.runs import TINY, make_workplace
from tools.prove_resume import Kill, Training, differences, examine, judge, main, parse

EPOCH_ENDS = (3, 6)
STEP_2 = {"kind": "step", "epoch": 1, "step": 2, "loss": 0.5, "rtfx": 100.0}
STEP_3 = {"kind": "step", "epoch": 1, "step": 3, "loss": 0.4, "rtfx": 101.0}
EPOCH_1 = {"kind": "epoch", "epoch": 1, "step": 3, "loss": 0.45, "rtfx": 50.0}
EPOCH_2 = {"kind": "epoch", "epoch": 2, "step": 6, "loss": 0.25, "rtfx": 50.0}


def leave(run: Path, *records: dict[str, object], checkpoint: int = 2) -> Path:
    """Leave a folder as a killed run does."""
    saved = run / "checkpoints" / "CKPT+2026-11-20+12-00-00+00"
    saved.mkdir(parents=True)
    (saved / "brain.ckpt").write_text(json.dumps({"optimizer_step": checkpoint}))
    (run / "train_log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return run


@pytest.mark.parametrize(
    ("records", "started", "phase"),
    [
        ([], 0, "starting"),
        ([STEP_2], 2e10, "starting"),
        ([STEP_2], 0, "training"),
        ([STEP_2, STEP_3], 0, "validating"),
        ([STEP_2, STEP_3, EPOCH_1], 0, "training"),
        ([STEP_2, STEP_3, EPOCH_1, EPOCH_2], 0, "testing"),
    ],
)
def test_it_tells_what_a_killed_run_was_doing(
    records: list[dict[str, object]], started: float, phase: str, tmp_path: Path
) -> None:
    run = leave(tmp_path / "run", *records)
    kill = examine(run, started=started, epoch_ends=EPOCH_ENDS)
    last = records[-1] if records else {"epoch": 0, "step": 0}
    assert kill == Kill("run", int(str(last["epoch"])), int(str(last["step"])), phase, 2)
    assert kill.row(1).endswith(f"{phase:10}  step 2")


def test_a_folder_that_is_begun_is_a_save(tmp_path: Path) -> None:
    run = leave(tmp_path / "run", STEP_2, STEP_3)
    (run / "checkpoints" / f"{UNFINISHED}CKPT").mkdir()
    assert examine(run, started=0, epoch_ends=EPOCH_ENDS).phase == "saving"


def save(run: Path, model: torch.nn.Module) -> Path:
    """Leave a folder as a run does that has ended."""
    run.mkdir()
    Checkpointer(run / "checkpoints", recoverables={"model": model}).save_checkpoint()
    (run / "train_log.jsonl").write_text(json.dumps(STEP_2) + "\n")
    return run


def test_it_sees_a_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)
    one, same = save(tmp_path / "one", model), save(tmp_path / "same", model)
    (same / "train_log.jsonl").write_text(json.dumps({**STEP_2, "rtfx": 3.0}) + "\n")
    assert differences(one, same) == []

    with torch.no_grad():
        model.bias[0] = torch.nextafter(model.bias[0], torch.tensor(9.0))
    other = save(tmp_path / "other", model)
    (other / "train_log.jsonl").write_text(json.dumps({**STEP_2, "loss": 0.5 + 2**-53}) + "\n")
    loss, parameter = differences(other, one)
    assert "0.5000000000000001" in loss
    assert parameter == "bias"

    assert judge([], {"other": [loss, parameter]}, tmp_path) == 1
    assert "other: bias" in capsys.readouterr().out
    assert other.exists()


def test_what_follows_the_yaml_is_train_pys() -> None:
    options = parse(["--kills", "2", "hparams/ctc.yaml", "--seed=7"])
    assert (options.kills, options.seed) == (2, 0)
    assert options.training == ["hparams/ctc.yaml", "--seed=7"]


@pytest.mark.slow
def test_a_run_killed_twice_ends_as_one_that_was_not(
    asterisk_english: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The seed's moments are late in a run, so that none is trained for nothing."""
    workplace = make_workplace(asterisk_english, tmp_path)
    knobs = [
        "hparams/ctc.yaml",
        f"--data_folder={workplace.release}",
        *TINY,
        "--number_of_epochs=2",
        "--check=false",
    ]

    def start(training: Training, run: Path) -> Process:
        command = ["train.py", *training.arguments, f"--output_folder={run}"]
        return Process(command, SBKIT_CACHE=workplace.cache)

    monkeypatch.setattr(Training, "start", start)
    monkeypatch.setattr(sys, "argv", ["prove_resume", "--kills=2", "--seed=729", *knobs])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main() == 0
    said = capsys.readouterr().out
    assert "2 kills in" in said
    assert "bit for bit" in said
    assert not list(tmp_path.glob("prove_resume_*"))
