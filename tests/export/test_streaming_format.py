"""A streaming model by onnxruntime has the log-probabilities and events of torch, without torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.export.export import export_run
from sbkit.export.parity import Grid
from sbkit.streaming.recognizer import StreamingRecognizer
from sbkit.streaming.session import Session, advance_batch
from tests.runtime.bundles import ROOT, make_bundle, make_live_run, parity_report


@pytest.mark.slow(20)
def test_sherpas_online_recognizer_writes_the_same(asterisk_english: Path, tmp_path: Path) -> None:
    run = make_live_run(tmp_path / "run", d_model=64, cnn_channels=24)
    grid = Grid(batches=(1, 2), seconds=(0.02, 0.655, 1.3))
    export_run(run, tmp_path / "bundle", formats=["sherpa-onnx"], grid=grid)
    found = parity_report(tmp_path / "bundle", "sherpa-onnx")["wenet_ctc, online"]
    assert found["written"] and found["held_out"]["utterances"] == 65
    assert found["held_out"]["utterances_with_other_tokens"] == 0
    assert found["held_out"]["transcripts_with_other_words"] == 0


@pytest.mark.slow(20)
def test_its_chunks_are_written_compared_and_run_live(streaming: Path) -> None:
    found = parity_report(streaming, "onnx")["streaming, fp32"]
    assert found["written"] and found["grid"]["largest_difference"] < 1e-4
    random = np.random.default_rng(0)
    clips = [(3000 * random.normal(size=size)).astype(np.int16) for size in (300, 20_000, 60_123)]
    said = []
    for runtime in ("torch", "onnx"):
        with StreamingRecognizer.load(streaming, runtime=runtime) as recognizer:
            sessions, events = [Session(recognizer) for _ in clips], []
            for first in range(0, 70_000, 7_000):
                for session, clip in zip(sessions, clips, strict=True):
                    session.feed(clip[first : first + 7_000])
                events += advance_batch(sessions)
            said.append([*events, *(session.finish() for session in sessions)])
    assert any(said[0])
    assert said[0] == said[1]


def test_live_speech_by_onnxruntime_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys, sbkit.commands.listen; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    with pytest.raises(SbkitError, match=r"has no onnx/streaming\.onnx"):
        StreamingRecognizer.load(make_bundle(tmp_path), runtime="onnx")
