"""A user's own parts and recipe, in files beside a YAML that lies outside of the checkout."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

import train
from sbkit.base.errors import BAD_INPUT
from sbkit.base.process import run_main
from tests import processes
from tests.runs import ROOT, TINY, Workplace, read_json

MODELS = '''
"""A front-end without lengths whose layers round down, a plain LSTM, and an encoder of audio."""

import torch
from torch import nn
from torch.nn.functional import pad, silu


class FrontEnd(nn.Module):
    def __init__(self, n_mels: int, d_model: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(n_mels, d_model, 3, 2), nn.ReLU(), nn.Conv1d(d_model, d_model, 3, 2)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features.transpose(1, 2) / 10).transpose(1, 2)


class Encoder(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d_model, d_model, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Waveforms(nn.Module):
    """Two strided convolutions over audio, and a layer that autocast is to leave alone."""

    audio_scale = 1.0
    precision = "fp32"

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, d_model, 400, 160)
        self.conv2 = nn.Conv1d(d_model, d_model, 4, 4)
        self.norm = nn.LayerNorm(d_model)

    def frame_lengths(self, audio_lengths: torch.Tensor) -> torch.Tensor:
        return (audio_lengths + 639) // 640

    def forward(self, audio: torch.Tensor, audio_lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        padded = pad(audio, (0, 880)).unsqueeze(1)
        x = self.conv2(silu(self.conv1(padded))).transpose(1, 2)
        return {"last_hidden_state": self.norm(x)}
'''

RECIPE = '''
"""The recognizer of sbkit, which says hello."""

from dataclasses import replace

from recipes.asr.recipe import ASR


def prepare_splits(knobs):
    print("hello from", knobs["greeting"])
    return ASR.prepare_splits(knobs)


MINE = replace(ASR, prepare_splits=prepare_splits)
'''

DROPPED = ("Transformer", "seq_lin", "CNN", "model")
OWN = """
CNN: !new:own_parts_of_a_test.FrontEnd
    n_mels: !ref <n_mels>
    d_model: !ref <d_model>

Transformer: !new:own_parts_of_a_test.Encoder
    d_model: !ref <d_model>

model: !new:torch.nn.ModuleList
    - [!ref <CNN>, !ref <Transformer>, !ref <ctc_lin>]
"""
UNUSED = ("cnn_channels", "nhead", "d_ffn", "num_encoder_layers", "num_decoder_layers")
UNUSED += ("encoder_module", "kernel_size", "dropout", "label_smoothing")


WAVEFORMS = """
encoder: !new:own_parts_of_a_test.Waveforms
    d_model: !ref <d_model>

model: !new:torch.nn.ModuleList
    - [!ref <encoder>, !ref <ctc_lin>]
"""
OF_FEATURES = ("n_mels", "time_masks", "time_width", "max_time_fraction", "freq_masks")
OF_FEATURES += ("freq_width",)


def own_yaml(parts: str = OWN, dropped: Sequence[str] = DROPPED, unused: Sequence[str] = ()) -> str:
    """Write ctc.yaml with parts of one's own in place of some of its blocks."""
    text = (ROOT / "hparams/ctc.yaml").read_text(encoding="utf-8")
    knobs, objects = text.split("# ======== objects\n")
    lines = [
        line for line in knobs.splitlines() if line.partition(":")[0] not in (*UNUSED, *unused)
    ]
    blocks = [
        block for block in objects.split("\n\n") if block.strip().split(":")[0] not in dropped
    ]
    before, after = blocks[:2], blocks[2:]
    head = "\n".join(lines).replace("recipes.asr.recipe.ASR", "own_recipe_of_a_test.MINE")
    head = head.replace("inter_ctc_weight: 0.3", "inter_ctc_weight: 0.0")
    return head + "\ngreeting: a test\n" + "\n\n".join([*before, parts.strip(), *after]) + "\n"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_parts_of_a_test.py").write_text(MODELS)
    (folder / "own_recipe_of_a_test.py").write_text(RECIPE)
    (folder / "own.yaml").write_text(own_yaml())
    features = (*DROPPED, "compute_features", "spec_augment")
    (folder / "waveforms.yaml").write_text(own_yaml(WAVEFORMS, features, OF_FEATURES))
    return folder


def run(workplace: Workplace, cwd: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return processes.run(command, cwd=cwd, timeout=200, SBKIT_CACHE=workplace.cache)


@pytest.mark.slow
@pytest.mark.parametrize("yaml", ["own.yaml", "waveforms.yaml"])
def test_own_parts_are_checked_trained_exported_and_transcribe(
    yaml: str, own: Path, workplace: Workplace, tmp_path: Path
) -> None:
    sizes = [each for each in TINY if each.split("=")[0][2:] not in (*UNUSED, "ctc_weight")]
    options = [*sizes, f"--data_folder={workplace.release}", f"--output_folder={tmp_path / 'run'}"]
    checked = run(workplace, tmp_path, "-m", "sbkit", "check", own / yaml, *options)
    assert "error:" not in checked.stdout, checked.stdout + checked.stderr
    trained = run(
        workplace, tmp_path, ROOT / "train.py", own / yaml, *options, "--number_of_epochs=1"
    )
    assert trained.returncode == 0, trained.stderr
    assert "hello from a test" in trained.stdout
    assert read_json(tmp_path / "run/summary.json")["test"]["test"]["utterances"] == 4

    export = ("-m", "sbkit", "export", tmp_path / "run", "--out", tmp_path / "bundle")
    imported = ("--import", "own_parts_of_a_test")
    refused = run(workplace, own, *export)
    assert refused.returncode == BAD_INPUT
    assert "own_parts_of_a_test" in refused.stderr and "--import" in refused.stderr
    assert run(workplace, own, *export, *imported).returncode == 0

    clip = next((workplace.release / "clips").iterdir())
    transcribe = ("-m", "sbkit", "transcribe", tmp_path / "bundle", clip)
    refused = run(workplace, own, *transcribe)
    assert refused.returncode == BAD_INPUT
    assert "--import own_parts_of_a_test" in refused.stderr
    assert run(workplace, own, *transcribe, *imported).returncode == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("null", "must name the recipe to run, but is None"),
        ("nothing.there.X", "must name something importable, but nothing.there raised ModuleNotF"),
        (
            "raising_recipe_of_a_test.X",
            "raising_recipe_of_a_test raised ZeroDivisionError (division",
        ),
        ("recipes.asr.recipe.NONE", "is not there"),
        ("recipes.asr.recipe.AsrBrain", "is type"),
    ],
)
def test_a_recipe_that_is_none_is_one_sentence(
    name: str,
    words: str,
    own: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    yaml = tmp_path / "own.yaml"
    (tmp_path / "raising_recipe_of_a_test.py").write_text("1 / 0\n")
    yaml.write_text((own / "own.yaml").read_text().replace("own_recipe_of_a_test.MINE", name))
    with patch.object(sys, "argv", ["train.py", str(yaml)]), pytest.raises(SystemExit) as left:
        run_main(train.main)
    assert left.value.code == BAD_INPUT
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
