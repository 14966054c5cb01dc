"""Adapters of a pretrained encoder: trained, merged on export, and left behind by `init_from`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sbkit.audio.io import read_audio
from sbkit.commands.cli import run as sbkit
from sbkit.config.hparams import load_hparams
from sbkit.models.asr import AsrModel
from sbkit.models.encoder import encoder_parts
from sbkit.runtime.torch_model import load_bundle
from sbkit.train.initialize import read_named_weights
from sbkit.train.setup import RunSetup
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

    clips = sorted((workplace.release / "clips").glob("*"))[:2]
    samples = [torch.from_numpy(read_audio(clip)).float() for clip in clips]
    lengths = torch.tensor([*map(len, samples)])
    audio = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    merged, unmerged = load_bundle(bundle).model.network, trained_model(run)
    with torch.inference_mode():
        one, other = (
            folder.ctc_log_probs(folder.encode(audio, lengths)[0]) for folder in (merged, unmerged)
        )
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)

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
        assert RunSetup(YAML, {"init_from": str(begun)}).knobs["encoder_config"]["source"] == named
    of_bundle, of_run = map(read_named_weights, (bundle, run))
    assert of_bundle.keys() == of_run.keys()
    assert all(torch.equal(of_bundle[name], of_run[name]) for name in of_run)


def trained_model(run: Path) -> AsrModel:
    """Load the tested model of a run, with its adapters."""
    hparams = load_hparams(run / "hyperparams.yaml", {})
    hparams["model"].load_state_dict(last_parameters(run))
    hparams["model"].eval()
    heads = {name: hparams[name] for name in ("linear_stack", "ctc_lin", "seq_lin")}
    vocabulary = hparams["tokenizer"].vocabulary
    return AsrModel(
        model=hparams["model"], **encoder_parts(hparams), **heads, vocabulary=vocabulary
    )
