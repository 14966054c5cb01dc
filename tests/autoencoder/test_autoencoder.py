"""A user task that predicts neither text nor labels is trained, resumed, tested, exported and run.

sbkit does not know it: all of its code is in this folder.
"""

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from sbkit.base.errors import ASKED_TO_STOP, SbkitError
from sbkit.checkpoint.checkpointer import AveragedCheckpoints, Checkpointer
from sbkit.commands.cli import run as sbkit
from sbkit.logs.run_log import read_log
from sbkit.runtime.torch_model import load_bundle
from tests.autoencoder.autoencoder import LOG_MEL_CODING, Autoencoder, AutoencoderBrain
from tests.runs import Workplace, last_parameters, read_json, stopped_after

MODULE = "tests.autoencoder.autoencoder"
IMPORT = ("--import", MODULE)


def train(workplace: Workplace, run: Path, *options: str) -> int:
    return workplace.train_here(
        run, *options, yaml=f"{Path(__file__).parent}/autoencoder.yaml", tiny=()
    )


@pytest.fixture(scope="module")
def trained(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "run"
    assert train(workplace, run, "--average_checkpoints=2") == 0
    return run


def test_user_task_without_metrics_is_ranked_by_its_loss_and_tested(trained: Path) -> None:
    epochs = [entry for entry in read_log(trained / "train_log.jsonl") if "valid_loss" in entry]
    assert len(epochs) == 3
    assert epochs[-1]["valid_loss"] < epochs[0]["valid_loss"]
    checkpoints = trained / "checkpoints"
    best, _ = Checkpointer(checkpoints).find_checkpoints(min_key="loss")
    assert best.meta["loss"] == min(epoch["valid_loss"] for epoch in epochs)
    averaged = AveragedCheckpoints.read(checkpoints)
    assert averaged is not None and len(averaged.of) == 2
    figures = read_json(trained / "summary.json")["test"]["test"]
    assert figures["loss"] == pytest.approx(epochs[-1]["valid_loss"], rel=0.5)


def test_stopped_run_resumes_to_the_same_weights(
    trained: Path, workplace: Workplace, tmp_path: Path
) -> None:
    with stopped_after(5, AutoencoderBrain):
        assert train(workplace, tmp_path) == ASKED_TO_STOP
    assert train(workplace, tmp_path) == 0
    whole, resumed = last_parameters(trained), last_parameters(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_user_task_is_exported_and_run_from_its_bundle(
    trained: Path, workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    with pytest.raises(SbkitError, match=f"pass --import {MODULE}"):
        sbkit(["export", str(trained), "--out", str(out)])
    assert sbkit(["export", str(trained), "--out", str(out), *IMPORT]) == 0
    assert "# Autoencoder of log-mel frames" in (out / "README.md").read_text()
    with pytest.raises(SbkitError, match=f"pass --import {MODULE}"):
        load_bundle(out)

    bundle = load_bundle(out, user_modules=frozenset([MODULE]))
    assert bundle.task is LOG_MEL_CODING and type(bundle.model.network) is Autoencoder
    clip = np.random.default_rng(0).integers(-9000, 9000, 16_000, np.int16)
    decoded, lengths = bundle.predict([clip, clip[:8000]])
    assert decoded.shape == (2, int(lengths.max()), 40)
    with pytest.raises(SbkitError, match="`sbkit transcribe` cannot run this kind"):
        bundle.transcribe([clip])

    capsys.readouterr()
    table = str(workplace.release / "test.tsv")
    with patch.dict(os.environ, {"SBKIT_CACHE": str(workplace.cache)}):
        assert sbkit(["score", str(out), table, "--out", str(tmp_path / "scores"), *IMPORT]) == 0
    expected = read_json(trained / "summary.json")["test"]["test"]["loss"]
    scored = read_json(tmp_path / "scores/summary.json")["test"]["test"]
    assert scored["loss"] == pytest.approx(expected, rel=1e-4)
    assert capsys.readouterr().out == f"test: loss {expected:.4g}, 4 utterances\n"
