"""`sbkit check --learn`: runs that learn eight clips, and runs that do not, with what to try."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from sbkit.base.errors import ConfigError
from sbkit.check import learn
from sbkit.check.learn import LEARNING_TEST, check_learning
from sbkit.commands.cli import run as sbkit
from tests.check.harness import planned_run
from tests.runs import ROOT, TINY_VOICE, Workplace, one_thread

LARGER = ("--d_model=96", "--d_ffn=192", "--cnn_channels=96", "--num_decoder_layers=0")
LARGER += ("--ctc_weight=1.0", "--dropout=0.0")


@pytest.mark.slow
def test_learning_is_tried_and_printed_without_touching_the_run(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = workplace.arguments(tmp_path / "run", *LARGER, "--time_masks=10")
    with patch.dict(os.environ, {"SBKIT_CACHE": str(workplace.cache)}), one_thread():
        assert sbkit(["check", *command, "--learn"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith("--learn passed: 8 clips without masks or augmentation, ")
        assert sbkit(["check", *command, "--learn", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["learn"]
    assert record["outcome"] == "passed"
    assert record["values"]["CER"] <= 0.2
    assert record["losses"][-1] < record["losses"][0] / 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "key", "words"),
    [
        ("--lr=1e-6", "lr", "about 1,000 times too low. Try `lr: 0.001`."),
        ("--dropout=0.95", "dropout", "Dropout hides 95% of the model. Lower `dropout`."),
    ],
)
def test_clips_that_are_not_learned_are_reported_with_the_evident_cause(
    option: str,
    key: str,
    words: str,
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learn, "MAX_STEPS", 20)
    with planned_run(workplace, tmp_path / "run", *LARGER, option) as planned:
        (finding,) = check_learning(planned)
        assert planned.results[LEARNING_TEST].outcome == "failed"
    assert finding.stops
    assert finding.where == f"override of {key}"
    assert words in finding.fix


@pytest.mark.slow
def test_loss_of_another_task_must_fall(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "MAX_STEPS", 60)
    yaml = ROOT / "hparams/tts.yaml"
    with planned_run(workplace, tmp_path / "run", recipe=None, yaml=yaml, tiny=TINY_VOICE) as run:
        assert [*check_learning(run)] == []
        assert run.results[LEARNING_TEST].outcome == "passed"


def test_another_machine_cannot_be_tried(workplace: Workplace, tmp_path: Path) -> None:
    command = ["check", *workplace.arguments(tmp_path / "run"), "--learn", "--target=cuda:2"]
    with pytest.raises(ConfigError, match="`--learn` trains on this machine, but --target names"):
        sbkit(command)
