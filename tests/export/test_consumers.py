"""Every written format recognizes the words of the trained model, in the library that loads it.

The libraries are onnxruntime and sherpa-onnx; transformers is in tests/export/test_huggingface.py.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import sherpa_onnx
import soundfile
import torch
from speechbrain.dataio.batch import PaddedBatch

from sbkit.audio.io import Samples
from sbkit.base.checksums import find_damage
from sbkit.export import format_table
from sbkit.runtime.onnx_model import OnnxModel
from sbkit.runtime.runtimes import load_bundle
from sbkit.runtime.torch_model import TorchModel
from sbkit.tasks.asr.bundle import AsrBundle
from sbkit.tasks.asr.session import Session, StreamingRecognizer, advance_batch
from tests.processes import run_fresh
from tests.runtime.bundles import ROOT, parity_report
from tests.test_readme import blocks
from tools import bench_transcribe
from tools.bench_transcribe import SIDES

pytestmark = pytest.mark.slow
FORMATS = [name for name, form in format_table.FORMATS.items() if not form.library]
Clips = list[Samples]


@pytest.fixture(scope="module")
def folder(exported: Path) -> Path:
    return exported


@pytest.fixture(scope="module")
def bundle(exported: Path) -> AsrBundle[TorchModel]:
    return load_bundle(exported)


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_written_with_its_parity_report(exported: Path, name: str) -> None:
    assert find_damage(exported / name) is None
    for precision, report in parity_report(exported, name).items():
        assert report["written"] and not report["reasons"]
        rates = report["test_sets"]["error_rates"]
        assert rates["utterances"] == sum(report["test_sets"]["sets"].values()) == 65
        if precision != "int8":
            trained = report["test_sets"]["error_rates_of_the_trained_model"]
            # sherpa-onnx computes features itself, and none of a window that crosses the end.
            num_different = report["test_sets"]["texts_with_other_words"]
            assert name == "sherpa-onnx" or (rates == trained and not num_different)
            assert rates["CER"] == pytest.approx(trained["CER"], abs=0.002)
            assert num_different <= 6


def test_quiet_clips_are_recognized_alike(exported: Path, clips: Clips) -> None:
    onnx, folder = OnnxModel.load(exported), exported / "sherpa-onnx"
    model, tokens = str(folder / "model.onnx"), str(folder / "tokens.txt")
    sherpa = sherpa_onnx.OfflineRecognizer.from_fire_red_asr_ctc(model=model, tokens=tokens)
    loud = np.random.default_rng(0).normal(0, 9000, 399).astype(np.int16)  # below a window
    for clip in [*clips[::8], loud[:0], loud]:
        outputs, texts = [], []
        for gain in (1.0, 10 ** (-30 / 20)):
            audio = (clip / np.float32(32768) * gain).astype(np.float32)
            outputs.append(onnx.log_probs(audio[None], np.array([len(audio)])).log_probs)
            stream = sherpa.create_stream()
            stream.accept_waveform(16_000, audio)
            sherpa.decode_stream(stream)
            texts.append(stream.result.text)
        np.testing.assert_allclose(outputs[1], outputs[0], rtol=0, atol=1e-3)
        assert texts[1] == texts[0]


def test_page_runs_formats_in_other_programs(
    exported: Path,
    bundle: AsrBundle[TorchModel],
    clips: Clips,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my-formats").symlink_to(exported)
    soundfile.write(tmp_path / "call.wav", clips[-1], 16_000)
    monkeypatch.chdir(tmp_path)
    plain, sherpa = blocks((ROOT / "docs/guide/export.md").read_text("utf-8"), "python")
    others = "import sys; sys.modules |= dict.fromkeys(('sbkit', 'torch', 'soundfile')); "
    process = run_fresh(f"{others}\n{plain}", cwd=tmp_path)
    assert process.stdout.strip() == bundle.transcribe(clips[-1:])[0], process.stderr
    exec(sherpa, {})
    assert capsys.readouterr().out.split() == process.stdout.split()


def test_page_calls_a_bundle_from_code_of_speechbrain(
    exported: Path,
    bundle: AsrBundle[TorchModel],
    clips: Clips,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my-model").symlink_to(exported)
    monkeypatch.chdir(tmp_path)
    *_, code = blocks((ROOT / "docs/start/from-speechbrain.md").read_text("utf-8"), "python")
    signals = [torch.from_numpy(clip / np.float32(32768)) for clip in clips[-3:]]
    names = {"batch": PaddedBatch([{"id": f"{n}", "sig": s} for n, s in enumerate(signals)])}
    exec(code, names)
    assert names["texts"] == [bundle.transcribe([clip])[0] for clip in clips[-3:]]


@pytest.fixture
def data(asterisk_english: Path, tmp_path: Path) -> Path:
    (tmp_path / "clips").symlink_to(asterisk_english / "clips")
    lines = (asterisk_english / "test.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "test.tsv").write_text("".join(lines[:9]))
    return tmp_path / "test.tsv"


def test_sides_of_bench_transcribe_take_turns_and_recognize_the_same_words(
    exported: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", str(exported), str(data), "--rounds=1"])
    bench_transcribe.main()
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["side"] for line in lines[: len(SIDES)]] == [*SIDES]
    rows = [line.strip("| ").split(" | ") for line in lines[-len(SIDES) :]]
    others = {name: (clips, different) for name, _, clips, different, *_ in rows}
    assert others.keys() == {*SIDES} and others.pop("onnx-int8")[0] == "8"
    assert {*others.values()} == {("8", "0")}


@pytest.mark.slow(20)
def test_onnx_chunks_of_80_ms_frames_have_the_events_of_torch(streaming: Path) -> None:
    report = parity_report(streaming, "onnx")["streaming, fp32"]
    assert report["written"] and report["largest_difference"] < 1e-4
    random = np.random.default_rng(0)
    clips = [(3000 * random.normal(size=size)).astype(np.int16) for size in (300, 14_000, 60_123)]
    events_by_runtime = []
    for runtime in ("torch", "onnx"):
        with StreamingRecognizer.load(streaming, runtime=runtime) as recognizer:
            sessions, events = [Session(recognizer) for _ in clips], []
            for first in range(0, 70_000, 7_000):
                for session, clip in zip(sessions, clips, strict=True):
                    session.feed(clip[first : first + 7_000])
                events += advance_batch(sessions)
            for session in sessions:
                session.is_finished = True  # the last chunks have lengths of their own
            events_by_runtime.append([*events, *advance_batch(sessions)])
    torch_events, onnx_events = events_by_runtime
    assert any(torch_events)
    assert torch_events == onnx_events


def test_exported_formats_contain_no_local_path(exported: Path) -> None:
    root = str(Path(__file__).parents[2]).encode()
    for file in exported.rglob("*"):
        assert not file.is_file() or root not in file.read_bytes(), file
