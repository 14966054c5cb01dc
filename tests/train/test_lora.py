"""Adapters of a pretrained encoder: trained, merged on export, and left behind by `init_from`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sbkit.commands.cli import run as sbkit
from sbkit.train.initialize import read_named_weights
from sbkit.train.setup import read_values
from tests.models.pretrained.folders import make_folder
from tests.runs import ROOT, Workplace, last_parameters, read_json

pytestmark = pytest.mark.slow

YAML = ROOT / "hparams/ctc_pretrained.yaml"
LORA = "--lora={rank: 2, alpha: 8, projections: [q_proj, v_proj]}"
ONE = ("--device=cpu", "--check=False", "--number_of_epochs=1", "--batch_seconds=6", "--lr=0.05")
PLAIN = ("--word_lm_order=0", "--token_lm_order=0", "--average_checkpoints=1", "--ema_decay=0.9")


def train(workplace: Workplace, run: Path, *options: str) -> int:
    return workplace.train_here(run, *options, yaml=str(YAML), tiny=(*ONE, *PLAIN))


def test_lora_is_merged_on_export_and_kept_by_init_from(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run, bundle = (tmp_path / name for name in ("source", "run", "bundle"))
    make_folder(source)
    options = (f"--pretrained={source}", LORA, "--freeze=[CNN]", "--check=True")
    assert train(workplace, run, *options) == 0
    named = read_json(run / "run_config.json")["values"]["encoder_config"]["source"]
    assert named["name"] == source.name
    assert sbkit(["export", str(run), "--out", str(bundle)]) == 0
    pretrained, exported = (load_file(folder / "model.safetensors") for folder in (source, bundle))
    layer = "encoder.layers.0.attention"
    for name, is_adapted in (("q_proj", True), ("k_proj", False)):
        weight = f"{layer}.{name}.weight"
        assert torch.equal(pretrained[weight], exported[f"1.body.{weight}"]) is not is_adapted
    assert not [name for name in exported if "lora" in name]
    card = (bundle / "README.md").read_text()
    assert "moving average over the training steps, with decay 0.9" in card

    capsys.readouterr()
    tokens = ("--token_type=bpe", "--vocab_size=40", "--lr=0.0")
    again = tmp_path / "again"
    assert train(workplace, again, f"--init_from={run}", *tokens) == 0
    assert (
        "40 rows by token: seq_lin.weight, seq_lin.bias, ctc_lin.weight" in capsys.readouterr().out
    )
    parameters = last_parameters(again)
    assert all(torch.equal(parameters[name], exported[name]) for name in exported if "body" in name)
    for begun in (bundle, run):
        assert (
            read_values(YAML, {"init_from": str(begun)}).knobs["encoder_config"]["source"] == named
        )
    of_bundle, of_run = map(read_named_weights, (bundle, run))
    assert of_bundle.keys() == of_run.keys()
    assert all(torch.equal(of_bundle[name], of_run[name]) for name in of_run)
