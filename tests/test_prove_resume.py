"""`prove_resume` passes for a killed and resumed run, and finds a flipped bit."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sbkit.checkpoint.checkpointer import Checkpointer
from tests.processes import Process
from tests.runs import TINY, Workplace
from tools import prove_resume
from tools.prove_resume import differences, main

STEP_2 = {"kind": "step", "epoch": 1, "step": 2, "loss": 0.5, "rtfx": 100.0}


def save(run: Path, model: torch.nn.Module, **figures: float) -> Path:
    Checkpointer(run / "checkpoints", recoverables={"model": model}).save_checkpoint()
    (run / "train_log.jsonl").write_text(json.dumps({**STEP_2, **figures}) + "\n")
    return run


def test_differences_finds_one_flipped_bit(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    run = save(tmp_path / "run", model)
    assert differences(run, save(tmp_path / "same", model, rtfx=3.0)) == []
    with torch.no_grad():
        model.bias[0] = torch.nextafter(model.bias[0], torch.tensor(9.0))
    loss, parameter = differences(save(tmp_path / "other", model, loss=0.5 + 2**-53), run)
    assert "0.5000000000000001" in loss
    assert parameter == "bias"


@pytest.mark.slow(30)
def test_run_killed_twice_equals_uninterrupted_run(
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The kills of this seed come late in a run, so that little is trained twice.

    The second start is of two ranks, and is killed in a save. It maps the rows that the first run
    has prepared.
    """
    start_ranks = prove_resume.start
    options = ("--number_of_epochs=2", "--freeze={CNN: always, Transformer: 8}", "--check=false")
    settings = ["hparams/ctc.yaml", f"--data_folder={workplace.release}", *TINY, *options]

    def start(arguments: Sequence[str], ranks: int, run: Path) -> Any:
        if ranks > 1:
            return start_ranks(arguments, ranks, run)
        return Process(["train.py", *arguments, f"--output_folder={run}"])

    monkeypatch.setenv("SBKIT_CACHE", str(workplace.cache))
    monkeypatch.setattr(prove_resume, "start", start)
    words = ["prove_resume", "--kills=2", "--seed=421", "--ranks=2", *settings]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main() == 0
    output = capsys.readouterr().out
    assert "2 kills; " in output
    assert "bit for bit" in output
    assert not list(tmp_path.glob("prove_resume_*"))
