"""A recognizer on a pretrained encoder: trained, stopped, resumed, checked, exported."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.models.pretrained.folder import DEFAULTS
from sbkit.train.initialize import read_named_weights
from sbkit.train.setup import declare_run
from tests.models.pretrained.folders import FRAMES, change_json, make_folder
from tests.runs import ROOT, Workplace, last_parameters, read_json, stopped_after

YAML = ROOT / "hparams/ctc_pretrained.yaml"
SMALL = (
    *("--device=cpu", "--check=False", "--batch_seconds=6", "--number_of_epochs=3"),
    *("--log_every=1", "--lr=0.01", "--num_linear_layers=1", "--layerdrop=0.3"),
    *("--mask_channel_length=4", "--inter_ctc_weight=0.3"),
    *("--word_lm_order=0", "--token_lm_order=0", "--freeze={CNN: always, Transformer: 5}"),
)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hub") / "tiny", **FRAMES)


def run_of(pretrained: Path) -> dict[str, Any]:
    """Return what a workplace needs to train a recognizer on an encoder."""
    return {"yaml": YAML, "tiny": (*SMALL, f"--pretrained={pretrained}")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("wav2vec2", FRAMES),
        ("wav2vec2-bert", {}),
        ("parakeet_encoder", {"subsampling_factor": 2}),  # frames of 20 ms
        ("whisper", {"max_source_positions": 1500}),
    ],
)
def test_run_stopped_where_freezing_ends_resumes_without_base_model(
    model_type: str, config: dict[str, Any], workplace: Workplace, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "tiny", model_type, **config)
    more = ("--number_of_epochs=2", "--average_checkpoints=1")
    assert workplace.train_here(tmp_path / "whole", *more, **run_of(folder)) == 0
    with stopped_after(5):
        workplace.train_here(tmp_path / "run", *more, **run_of(folder))
    assert list((tmp_path / "run/checkpoints").iterdir())
    shutil.rmtree(folder)
    more = (*more, "--check=True")
    assert workplace.train_here(tmp_path / "run", *more, **run_of(folder)) == 0
    expected = last_parameters(tmp_path / "whole")
    for name, value in last_parameters(tmp_path / "run").items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_check_reports_masks_and_writes_no_files(
    workplace: Workplace, pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = workplace.arguments(tmp_path / "run", **run_of(pretrained))
    assert workplace.sbkit("check", *words) == 0
    assert not (tmp_path / "run").exists()
    assert "[masks]" not in capsys.readouterr().out
    workplace.sbkit("check", *words, "--mask_time_length=75", "--mask_channel_length=25")
    output = capsys.readouterr().out
    assert re.search(r"note: Utterances are shorter than the 75 frames of a .* in train", output)
    assert "note: A mask of 25 channels is wider than the encoder (24)" in output


@pytest.mark.slow
def test_check_finds_utterances_without_positions(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 1.5 s, slowed down to 1.67 s."""
    folder = make_folder(tmp_path / "tiny", "whisper", max_source_positions=80)
    words = workplace.arguments(tmp_path / "run", **run_of(folder))
    assert workplace.sbkit("check", *words) != 0
    output = capsys.readouterr().out
    assert re.search(r"error: Utterances.* longer than the 1\.6 s that .* in train", output)
    assert "`max_seconds: 1.44`" in output


# -- refused before anything is prepared -----------------------------------------------------------


def test_run_without_encoder_is_refused() -> None:
    with pytest.raises(SbkitError, match="`pretrained` must be .* but is null"):
        declare_run(YAML, {})


def test_encoder_with_other_sample_rate_is_refused(pretrained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pretrained, tmp_path / "tiny"))
    change_json(folder / "preprocessor_config.json", sampling_rate=8000)
    with pytest.raises(SbkitError, match="`sample_rate` must be the 8000 Hz .* but is 16000"):
        declare_run(YAML, {"pretrained": str(folder)})


def test_encoder_without_decoder_is_refused(pretrained: Path) -> None:
    with pytest.raises(ConfigError, match="must be a Whisper .* but is wav2vec2") as caught:
        declare_run(ROOT / "hparams/whisper.yaml", {"pretrained": str(pretrained)})
    assert caught.value.keys == ("pretrained",)


@pytest.mark.parametrize(("is_in_the_yaml", "width"), [(False, 768), (True, 48)])
def test_encoder_config_without_folder_has_random_weights(
    width: int, is_in_the_yaml: bool, tmp_path: Path
) -> None:
    yaml, sizes = tmp_path / "ctc.yaml", {"model_type": "hubert", "hidden_size": width}
    written = f"encoder_config: {json.dumps(sizes) if is_in_the_yaml else 'null'}"
    yaml.write_text(re.sub(r"(?m)^encoder_config: null", written, YAML.read_text()))
    overrides = {} if is_in_the_yaml else {"encoder_config": sizes}
    config = declare_run(yaml, overrides).settings["encoder_config"]
    assert config.keys() == {"model_type", "source", *DEFAULTS["hubert"]}
    assert (config["hidden_size"], config["num_hidden_layers"]) == (width, 12)
    assert config["source"] is None


# -- adapters


@pytest.mark.slow
def test_lora_is_merged_on_export_and_kept_by_init_from(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ("--device=cpu", "--check=False", "--number_of_epochs=1", "--batch_seconds=6")
    tiny += ("--word_lm_order=0", "--token_lm_order=0", "--average_checkpoints=1")

    def train(run: Path, *options: str) -> int:
        options = ("--lr=0.05", "--ema_decay=0.9", *options)
        return workplace.train_here(run, *options, yaml=str(YAML), tiny=tiny)

    source, run, bundle = (tmp_path / name for name in ("source", "run", "bundle"))
    make_folder(source)
    lora = "--lora={rank: 2, alpha: 8, projections: [q_proj, v_proj]}"
    assert train(run, f"--pretrained={source}", lora, "--freeze=[CNN]", "--check=True") == 0
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
    assert train(again, f"--init_from={run}", *tokens) == 0
    by_token = "40 rows by label: ctc_lin.weight, ctc_lin.bias"
    assert by_token in capsys.readouterr().out
    parameters = last_parameters(again)
    assert all(torch.equal(parameters[name], exported[name]) for name in exported if "body" in name)
    for begun in (bundle, run):
        settings = declare_run(YAML, {"init_from": str(begun)}).settings
        assert settings["encoder_config"]["source"] == named
    of_bundle, of_run = map(read_named_weights, (bundle, run))
    assert of_bundle.keys() == of_run.keys()
    assert all(torch.equal(of_bundle[name], of_run[name]) for name in of_run)
