"""Runs on a mix of two sources: the loss and the size of each are logged."""

from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import soundfile

from recipes.asr.brain import AsrBrain
from sbkit.base.errors import ASKED_TO_STOP, BAD_INPUT
from tests.runs import Workplace, records_of, rows_of, stopped_after

pytestmark = pytest.mark.slow

NUM_REAL = 4
SOURCES = ("train", "train-synthetic")
LOGGED = ("ctc", "inter_ctc", "attention", "grad_norm")


@pytest.fixture
def options(workplace: Workplace, tmp_path: Path) -> list[str]:
    """Write four clips of train as one source, and twelve as the other."""
    train = rows_of(workplace.release / "train.tsv")
    dev = rows_of(workplace.release / "dev.tsv")
    options = ["--data_folder=null", "--mix.train-synthetic=0.6", "--batch_seconds=4"]
    tables = (train[:NUM_REAL], train[NUM_REAL:], dev)
    for name, rows in zip((*SOURCES, "dev"), tables, strict=True):
        clips = workplace.release / "clips"
        lines = [f"{clips / row['path']}\t{row['sentence']}\n" for row in rows]
        (tmp_path / f"{name}.tsv").write_text("path\tsentence\n" + "".join(lines))
        options += ["--manifest", f"{name}={tmp_path / name}.tsv"]
    return [*options, "--number_of_epochs=2", "--dropout=0.0", "--check=false"]


def source_losses(run: Path, kind: str) -> list[dict[str, float]]:
    keys = {name: f"source_loss/{name}" for name in SOURCES}
    keys |= {name: name for name in (*LOGGED, "valid_ctc") if kind == "epoch" or name in LOGGED}
    return [
        {name: record[key] for name, key in keys.items() if key in record}
        for record in records_of(run, kind)
    ]


def test_log_has_the_loss_of_each_source_and_resumes(
    workplace: Workplace, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    real = {Path(row["path"]).stem for row in rows_of(workplace.release / "train.tsv")[:NUM_REAL]}
    sums: dict[tuple[int, str], Any] = defaultdict(lambda: np.zeros(2))

    def add_by_hand(brain: Any, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
        epoch = brain.hparams.epoch_counter.current
        for id, *row in zip(batch.ids, loss.sums.tolist(), loss.counts.tolist(), strict=True):
            sums[epoch, SOURCES[id.partition("+")[0] not in real]] += row

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with patch.object(AsrBrain, "on_fit_batch_end", add_by_hand):
        assert workplace.train_here(whole, *options, "--log_every=3") == 0
    logged = source_losses(whole, "epoch")
    for epoch, losses in enumerate(logged, 1):
        by_hand = {name: np.divide(*sums[epoch, name]) for name in SOURCES}
        assert {name: losses[name] for name in SOURCES} == pytest.approx(by_hand, rel=1e-5)
    values = ", ".join(f"{name} {logged[-1][name]:.4g}" for name in SOURCES)
    assert f", {values}) valid loss" in capsys.readouterr().out
    with stopped_after(4):
        assert workplace.train_here(resumed, *options, "--log_every=3") == ASKED_TO_STOP
    assert workplace.train_here(resumed, *options, "--log_every=3") == 0
    for kind in ("step", "epoch"):
        assert source_losses(resumed, kind) == source_losses(whole, kind)

    log = (whole / "train.log").read_text()
    assert "source train: 4 utterances, " in log
    assert "source train-synthetic: 12 utterances, " in log


@pytest.mark.ddp
def test_two_ranks_log_as_one(workplace: Workplace, tmp_path: Path, options: list[str]) -> None:
    assert workplace.train_here(tmp_path / "1", *options) == 0
    process = workplace.train_forked(tmp_path / "2", *options, ranks=2)
    assert process.returncode == 0, process.stderr
    expected, logged = (source_losses(tmp_path / run, "step") for run in "12")
    assert len(expected) == len(logged) > 5
    for one, two in zip(expected, logged, strict=True):
        assert two == pytest.approx(one, rel=1e-4)


def test_source_without_utterances_is_refused(
    workplace: Workplace, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(40 * 8_000), 8_000)
    (tmp_path / "train-synthetic.tsv").write_text("path\tsentence\nlong.wav\tno\n")
    assert workplace.train_here(tmp_path / "run", *options) == BAD_INPUT
    sentence = "train-synthetic, but all of them are left out of training (longer than 32 s)."
    assert f"`mix` needs utterances of {sentence}" in capsys.readouterr().err
