"""`sbkit check --learn`: runs that learn eight clips, and runs that do not, with what to try."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from speechbrain import Stage

from recipes.asr.recipe import ASR, AsrBrain
from sbkit.base.errors import ConfigError
from sbkit.check import learn
from sbkit.check.learn import LEARNING_TEST, check_learning, find_better_factor
from sbkit.commands.cli import run as sbkit
from sbkit.data.batch import TextBatch
from sbkit.models.asr import Predictions
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
    ("option", "words", "suggested"),
    [("--lr=1e-6", "times too low", (1e-4, 1e-2)), ("--lr=1.0", "times too high", (1e-4, 0.1))],
)
def test_wrong_rate_is_found_by_the_sweep(
    option: str,
    words: str,
    suggested: tuple[float, float],
    workplace: Workplace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learn, "MAX_STEPS", 60)
    with planned_run(workplace, tmp_path / "run", *LARGER, option) as planned:
        (finding,) = check_learning(planned)
        assert planned.results[LEARNING_TEST].outcome == "failed"
    assert finding.stops
    assert finding.where == "override of lr"
    assert words in finding.problem
    rate = float(finding.fix.partition("`lr: ")[2].partition("`")[0])
    assert suggested[0] <= rate <= suggested[1]


@pytest.mark.slow
def test_high_dropout_is_named_and_not_the_device(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "MAX_STEPS", 20)
    monkeypatch.setattr(learn, "SWEPT_FACTORS", (0.1,))
    with planned_run(workplace, tmp_path / "run", *LARGER, "--dropout=0.95") as planned:
        (finding,) = check_learning(planned)
    assert finding.fix.startswith("Lower `dropout`, which hides 95% of the model.")


@pytest.mark.slow
def test_part_without_gradient_is_named(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Detached(AsrBrain):
        def compute_forward(self, batch: TextBatch, stage: Stage) -> Predictions:
            predictions = super().compute_forward(batch, stage)
            log_probs = self.hparams.ctc_lin(predictions.states.detach()).log_softmax(-1)
            return replace(predictions, log_probs=log_probs, intermediate=None)

    monkeypatch.setattr(learn, "MAX_STEPS", 20)
    monkeypatch.setattr(learn, "SWEPT_FACTORS", (0.1,))
    recipe = replace(ASR, brain=Detached)
    with planned_run(workplace, tmp_path / "run", *LARGER, recipe=recipe) as planned:
        (finding,) = check_learning(planned)
    assert "the gradients of `CNN`, `Transformer` are zero" in finding.problem
    assert "look for detach()" in finding.fix


@pytest.mark.slow
def test_loss_of_another_task_must_fall(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "MAX_STEPS", 60)
    yaml = ROOT / "hparams/tts.yaml"
    with planned_run(workplace, tmp_path / "run", recipe=None, yaml=yaml, tiny=TINY_VOICE) as run:
        assert [*check_learning(run)] == []
        assert run.results[LEARNING_TEST].outcome == "passed"


@pytest.mark.parametrize(
    ("own_loss", "losses", "factor"),
    [
        (4.0, (3.9, 1.05, 1.0, math.nan), 0.1),
        (4.0, (4.0, 3.9, 3.5, math.nan), None),
        (math.nan, (2.0, 4.0, math.nan, math.inf), 0.01),
        (math.nan, (math.nan,) * 4, None),
        (-4.0, (-4.0, -9.5, -10.0, math.nan), 0.1),  # such as SI-SNR
        (-4.0, (-4.0, -4.2, -3.0, math.nan), None),
    ],
)
def test_lowest_rate_with_a_good_loss_is_suggested(
    own_loss: float, losses: tuple[float, ...], factor: float | None
) -> None:
    swept = dict(zip((0.01, 0.1, 10.0, 100.0), losses, strict=True))
    assert find_better_factor(swept, own_loss) == factor


def test_another_machine_cannot_be_tried(workplace: Workplace, tmp_path: Path) -> None:
    command = ["check", *workplace.arguments(tmp_path / "run"), "--learn", "--target=cuda:2"]
    with pytest.raises(ConfigError, match="`--learn` trains on this machine, but --target names"):
        sbkit(command)
