"""An encoder of one's own runs live by its methods, or the check says why it does not."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from sbkit.commands.cli import run as sbkit
from tests.runs import ROOT, Workplace, read_json
from tests.runtime.bundles import edit_weights

TINY = (
    *("--device=cpu", "--batch_seconds=6", "--number_of_epochs=1"),
    *("--cnn_channels=32", "--d_model=32", "--subsampling=4", "--lr=0.02"),
)
CONVOLUTION = """
import torch
from torch import nn

from sbkit.models.layers import FrameConv


class LiveEncoder(nn.Module):
    chunk_frames = 8

    def __init__(self, d_model):
        super().__init__()
        self.conv = FrameConv(d_model, d_model, 3)

    def forward(self, x, lengths):
        return self.forward_chunk(x, lengths, {"past": x.new_zeros(x.shape[0], 2, x.shape[2])})[:2]

    def start(self):
        return {"past": torch.zeros(1, 2, self.conv.in_channels)}

    def forward_chunk(self, x, lengths, state):
        x = torch.cat([state["past"], x], 1)
        return self.conv(x), lengths, {"past": x[:, -2:]}
"""
IMPORTS = ("--import", "my_models", "--import", "my_live")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the YAML and the modules of the page."""
    for name in ("my_models.py", "my_live.py"):
        shutil.copy(ROOT / "tests/user_parts" / name, tmp_path)
    page = (ROOT / "docs/guide/own-parts.md").read_text("utf-8")
    (yaml,) = re.findall(r"```yaml\n(base: \S+ctc_streaming.*?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(yaml.replace("hparams", str(ROOT / "hparams")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_models", "my_live"):  # of another test
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.slow
def test_own_encoder_runs_live(folder: Path, workplace: Workplace, capsys: Captured) -> None:
    trained = workplace.train_here(folder / "run", yaml="mine.yaml", tiny=TINY)
    assert trained == 0, capsys.readouterr().err
    assert workplace.sbkit("export", "run", "--out", "model", *IMPORTS) == 0
    edit_weights(folder / "model", write_letters)
    clip = sorted((workplace.release / "clips").iterdir())[0]
    transcribe = ("transcribe", "model", clip, *IMPORTS, "--decoder", "greedy")
    texts = []
    for options in ((), ("--live",)):
        capsys.readouterr()
        assert workplace.sbkit(*transcribe, *options) == 0
        texts.append(capsys.readouterr().out.split())
    assert len("".join(texts[0])) > 1 and texts[0] == texts[1]


def write_letters(weights: dict[str, torch.Tensor]) -> None:
    """Let a model that has not learned anything write letters in place of blanks."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        scale = 0.5 if "lstm" in name else 10
        if name.partition(".")[0] in "123":
            weights[name] = scale * torch.randn(weight.shape, generator=generator)


@pytest.mark.slow
def test_own_encoder_runs_live_in_onnx(folder: Path, workplace: Workplace) -> None:
    """Its export compares the chunks with whole clips; an LSTM is not among what ONNX takes."""
    (folder / "my_live.py").write_text(CONVOLUTION)
    options = ("--export_formats=[onnx]",)
    assert workplace.train_here(folder / "run", *options, yaml="mine.yaml", tiny=TINY) == 0
    report = read_json(folder / "run/bundle/onnx/parity.json")
    chunks = report["compared_with_the_trained_model"]["streaming, fp32"]
    assert chunks["written"] and (folder / "run/bundle/onnx/streaming.onnx").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "my_live.py",
            'state["hidden"].transpose(0, 1)',
            '0 * state["hidden"].transpose(0, 1)',
            "Chunk by chunk, as in live speech, the model computes something else than for a whole",
        ),
        (
            "my_models.py",
            "return self.lstm(x)[0], lengths",
            "return self.lstm(x)[0].roll(-1, 1), lengths",
            "Chunk by chunk, as in live speech, the model computes something else than for a whole",
        ),
        (
            "my_live.py",
            "return states, lengths, {",
            "return states.reshape(1), lengths, {",
            r"The model does not run chunk by chunk, as live speech needs it \(RuntimeError: "
            r".*, in line 18 of .*my_live.py \(forward_chunk\)\)",
        ),
        (
            "my_live.py",
            "def start(",
            "def begin(",
            "runs in chunks, as live speech needs it, but `Transformer` has no `start`",
        ),
        (
            "mine.yaml",
            "freeze:",
            "CNN: {streaming: null}\nfreeze:",
            "but `CNN` sees frames after its own",
        ),
        ("mine.yaml", "freeze:", "level: utterance\nfreeze:", "`level` must be `running`"),
    ],
)
def test_what_cannot_run_live_is_refused_before_training(
    file: str,
    old: str,
    new: str,
    message: str,
    folder: Path,
    workplace: Workplace,
    capsys: Captured,
) -> None:
    text = (folder / file).read_text("utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    options = workplace.arguments(folder / "run", yaml="mine.yaml", tiny=TINY)
    assert sbkit(["check", *options]) == 1
    assert re.search(message, " ".join(capsys.readouterr().out.split()))
