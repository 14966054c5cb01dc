"""Formats are compared with the model before they are kept."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run as sbkit
from sbkit.evaluate import wer
from sbkit.export import onnx_format, sherpa_format
from sbkit.export.export import export_run
from sbkit.export.formats import declared_formats
from sbkit.export.parity import Candidate, Case, Comparison
from sbkit.export.recognizer_texts import best_path_texts
from sbkit.export.trace import WaveformModel, trace, trained_log_probs
from sbkit.runtime.onnx_model import BatchLogProbs
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.tasks.codec.task import CodecTask
from tests.runtime.bundles import make_run, parity_report
from tests.runtime.tones import speak, tone_bundle


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, asterisk_english: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("formats") / "run")


def off_by(
    difference: float | None,
) -> Callable[[AsrBundle[TorchModel], Path], Sequence[Candidate]]:
    """Make a writer whose format differs from the model by ``difference``.

    With None, the format runs only at one length, like some graphs of LSTMs.
    """

    def write(bundle: AsrBundle[TorchModel], folder: Path) -> Sequence[Candidate]:
        model = WaveformModel(bundle.model.network).eval()

        def log_probs(audio: Any, lengths: Any) -> BatchLogProbs:
            assert difference is not None, (
                "Guard failed in /home/ann/layer.py: audio.size()[1] == 16000"
            )
            output, frames = trained_log_probs(model, audio, lengths)
            return BatchLogProbs(output + np.float32(difference), frames)

        (folder / "model.onnx").touch()
        return [Candidate(name="fp32", files=["model.onnx"], run=log_probs)]

    return write


def test_format_that_does_not_run_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_format, "write_onnx", off_by(None))
    monkeypatch.setattr(sherpa_format, "write_sherpa", off_by(0.0))
    out = tmp_path / "bundle"
    options = ["--formats", "onnx, sherpa-onnx", "--license", "mit"]
    assert sbkit(["export", str(run), "--out", str(out), *options]) == 1
    printed = capsys.readouterr()
    first, *_, last = printed.err.splitlines()
    assert (printed.out, first) == (f"{out}\n", "writing onnx")
    assert "onnx (fp32) is not written: " in last
    assert "it raised AssertionError: Guard failed in /home/ann/layer.py" in last
    assert "in layer.py: audio" in (out / "onnx/parity.json").read_text()  # which is published
    assert not (out / "onnx" / "model.onnx").exists()
    assert 'license: "mit"' in (out / "README.md").read_text()
    assert load_bundle(out)


@pytest.mark.parametrize(("difference", "is_kept"), [(5e-4, True), (2e-3, False), (np.nan, False)])
def test_format_beyond_its_limits_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: float, is_kept: bool
) -> None:
    monkeypatch.setattr(onnx_format, "write_onnx", off_by(difference))
    export_run(run, tmp_path / "out", formats=["onnx"])
    load_bundle(tmp_path / "out")
    assert (tmp_path / "out/onnx/model.onnx").exists() == is_kept
    report = parity_report(tmp_path / "out", "onnx")["fp32"]
    assert report["written"] == is_kept
    assert is_kept or "outputs differ by" in report["reasons"][0]


def test_without_test_data_inexact_formats_are_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rounding(bundle: AsrBundle[TorchModel], folder: Path) -> Sequence[Candidate]:
        exact = off_by(0.0)(bundle, folder)
        (folder / "model.int8.onnx").touch()
        return [*exact, replace(exact[0], name="int8", files=["model.int8.onnx"], is_exact=False)]

    lost = Path(shutil.copytree(run, tmp_path / "run"))
    yaml = lost / "hyperparams.yaml"
    yaml.write_text(re.sub("(?m)^data_folder:.*", "data_folder: /nowhere", yaml.read_text()))
    monkeypatch.setattr(onnx_format, "write_onnx", rounding)
    export_run(lost, tmp_path / "out", formats=["onnx"])
    reports = parity_report(tmp_path / "out", "onnx")
    assert "compared on noise only. data_folder" in caplog.text and "/nowhere" in caplog.text
    assert "/nowhere" not in (tmp_path / "out/onnx/parity.json").read_text()
    assert "could not be read" in reports["fp32"]["test_sets"]["not_compared"]
    assert "only be compared on the run's test sets" in reports["int8"]["reasons"][0]
    files = {file.name for file in (tmp_path / "out/onnx").iterdir()}
    assert files == {"model.onnx", "parity.json", "checksums.json"}


def test_require_formats_refuses_an_unknown_format(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SbkitError, match="There is no format 'tflite'. Choose from onnx"):
        export_run(run, tmp_path / "out", formats=["onnx", "tflite"])


def test_declared_formats_must_be_formats_of_the_task() -> None:
    with pytest.raises(
        SbkitError, match="A codec cannot be exported as sherpa-onnx. Its formats: onnx"
    ):
        declared_formats({"export_formats": ["onnx", "sherpa-onnx"]}, CodecTask())


class FixedLength(nn.Module):
    """Treats the length of its example as a constant."""

    def forward(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return audio[:, : len(audio[0])].reshape(-1, 100, 1), audio_lengths


class Branching(nn.Module):
    """Branches on the loudness; torch would print the graph so far."""

    def forward(self, audio: Tensor, audio_lengths: Tensor) -> tuple[Tensor, Tensor]:
        return (audio * 2 if float(audio.abs().mean()) > 0.5 else audio), audio_lengths


@pytest.mark.parametrize("module", [FixedLength, Branching])
def test_trace_refuses_a_module_that_depends_on_its_example(
    module: type[nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SbkitError, match="for any batch size and length"):
        trace(module(), torch.zeros(3, 100), torch.tensor([100, 100, 50]))
    assert not capsys.readouterr().err


def test_comparison_counts_word_errors_of_test_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is on the WER, also if it is not the first rate."""
    bundle, tokenizer, model = tone_bundle(tmp_path)
    right, wrong = (
        BatchLogProbs(model.encode([speak(tokenizer, text)])[0].log_probs[None], np.array([24]))
        for text in ("the dogs", "the frog")
    )
    texts = partial(best_path_texts, bundle)
    candidate = Candidate(
        name="onnx",
        files=[],
        run=lambda audio, lengths: wrong,
        texts=texts,
        trained_texts=texts,
    )
    comparison = Comparison(candidate, bundle)
    comparison.add(Case(np.zeros((1, 1)), np.array([1]), "a clip", [{"text": "the dogs"}]), right)
    assert comparison.trained_errors.words.errors == 0 and comparison.errors.words.errors == 1
    assert comparison.num_different == 1
    monkeypatch.setattr(wer, "ERROR_RATES", dict(reversed(wer.ERROR_RATES.items())))
    assert comparison.reasons()[-1].startswith("WER is 50.00 %, ")


CODES, SIGNAL = np.zeros((2, 500), np.int64), np.zeros((2, 9), np.float32)


@pytest.mark.parametrize(
    ("codes", "signal", "reasons"),
    [
        (np.eye(2, 500, 499, dtype=np.int64), SIGNAL, []),
        (np.eye(2, 500, dtype=np.int64), SIGNAL, ["2 of 1000 integers differ"]),
        (CODES, SIGNAL + 0.002, ["outputs differ by 2.0e-03 (a clip); at most 1e-03 is allowed"]),
        (CODES[:1], SIGNAL, ["on a clip it raised ValueError: shape (1, 500) instead of (2, 500)"]),
    ],
)
def test_graph_of_other_outputs_is_not_written(
    codes: Any, signal: Any, reasons: list[str], tmp_path: Path
) -> None:
    """It has no texts, even if its task has labels."""
    bundle, _, _ = tone_bundle(tmp_path)
    candidate = Candidate(
        name="decode",
        files=[],
        run=lambda audio, lengths: [codes, signal],
        run_trained=lambda audio, lengths: [CODES, SIGNAL],
    )
    comparison = Comparison(candidate, bundle)
    comparison.add(Case(SIGNAL, np.array([9, 9]), "a clip", [{"text": "one"}] * 2), ())
    report = comparison.report("no data")
    assert (report["reasons"], report["test_sets"]) == (reasons, {"not_compared": "no data"})
