"""A streaming model in another format equals the trained model, in onnxruntime without torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sbkit.base.errors import SbkitError
from sbkit.tasks.recognition.session import Session, StreamingRecognizer, advance_batch
from tests.runtime.bundles import ROOT, parity_report


@pytest.mark.slow(20)
def test_onnx_chunks_of_80_ms_frames_have_the_events_of_torch(streaming: Path) -> None:
    report = parity_report(streaming, "onnx")["streaming, fp32"]
    assert report["written"] and report["grid"]["largest_difference"] < 1e-4
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


def test_listening_with_onnxruntime_imports_no_torch(plain_bundle: Path) -> None:
    code = "import sys, sbkit.tasks.recognition.live; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    with pytest.raises(SbkitError, match=r"has no onnx/streaming\.onnx"):
        StreamingRecognizer.load(plain_bundle, runtime="onnx")
