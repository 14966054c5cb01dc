"""A model card holds the facts of the run folder, and no others."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sbkit.export.model_card import card_facts, write_card
from sbkit.tasks.asr.task import AsrTask

CONFIG: dict[str, Any] = {
    "sample_rate": 16000,
    "language": "no",  # false, where YAML 1.1 reads it bare
    "parts": {"ctc_lin": {"new": "torch.nn.Linear", "arguments": {}}},
}
INTERVAL = {"low": 0.19, "high": 0.341, "unit": "clip", "unit_count": 65}
TEST = {"decoder": "beam", "WER": 0.2575, "WER_interval": INTERVAL, "greedy": {"WER": 0.395}}
TEST |= {"confidence": {"ECE": 0.051}}
SUMMARY = {"parameters": 2404288, "git_commit": "c6bb4af8", "test": {"test": TEST}}
REPORT = {
    "corpus": {"name": "Asterisk prompts", "license": "CC-BY-SA-3.0"},
    "splits": {"train": {"utterances": 419, "hours": 0.301, "speakers": 1}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "data_report.json").write_text(json.dumps(REPORT))
    (tmp_path / "train.log").write_text(
        "2026-11-21 08:23:38 train.py hparams/ctc.yaml --init_from=/home/ann/runs/base "
        "--manifest train=/data/a.csv --lr=1e-3 --debug --data_folder=s3://bucket/x\nmore\n"
    )
    (tmp_path / "hyperparams.yaml").write_text(
        "init_from: /home/ann/runs/base\nema_decay: 0.999\nlr: 0.001\ndata_folder: null\n"
    )
    return tmp_path


def card_of(run: Path, formats: Sequence[str] = (), **options: str) -> str:
    write_card(run, card_facts(run, AsrTask(), CONFIG, formats, **options))
    return (run / "README.md").read_text()


def test_card_has_data_results_licenses_and_command(run: Path) -> None:
    card = card_of(run, license="cc-by-4.0")
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["language"] == "no" and head["license"] == "cc-by-4.0"
    assert head["model-index"][0]["results"][0]["metrics"] == [{"type": "wer", "value": 0.2575}]
    (data,) = [result["dataset"] for result in head["model-index"][0]["results"]]
    assert data == {"name": "Asterisk prompts", "type": "asterisk-prompts", "split": "test"}
    for line in (
        "| train | 419 | 0.30 | 1 |",
        "| test | beam | WER | 25.75 % | 19.00 to 34.10 (65 clips) |",
        "| test | beam | calibration error of word confidences (ECE) | 0.05 | unknown |",
        "| test | greedy | WER | 39.50 % | unknown |",
        "    train.py ctc.yaml --init_from=... --manifest=... --lr=0.001 --debug=... "
        "--data_folder=...",
        "- fine-tuned from: base",
        "- weights: an exponential moving average over the training steps, with decay 0.999",
        "- corpus: Asterisk prompts",
        "- license of the corpus: CC-BY-SA-3.0",
        "- model: cc-by-4.0",
        "- commit: c6bb4af8",
    ):
        assert f"\n{line}\n" in card


@pytest.mark.parametrize("words", ["'", "ctc.yaml --help", "ctc.yaml --lr=2026-11-21", ""])
def test_command_of_a_log_may_be_anything(words: str, run: Path) -> None:
    (run / "train.log").write_text(f"2026-11-21 08:23:38 train.py {words}")
    assert "## How it was made" in card_of(run)


def test_card_of_an_empty_run_folder_says_unknown(tmp_path: Path) -> None:
    card = card_of(tmp_path)
    assert 'license: "unknown"' in card and "fill it in before you publish" in card
    assert "Unknown: the model was not tested." in card and "no report of its data" in card


def test_card_says_how_its_formats_are_loaded(run: Path) -> None:
    card = card_of(run, ["sherpa-onnx"])
    assert "\n- sherpa-onnx: `OfflineRecognizer.from_fire_red" in card and "- onnx" not in card
