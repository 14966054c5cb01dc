"""A recording that is longer than Whisper's positions has one form of log-probabilities."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from sbkit.config.document import read_document
from sbkit.export.export import export_run
from sbkit.runtime.runtimes import load_bundle, load_in_thread
from sbkit.runtime.score_sets import prepare_user_set
from sbkit.tasks.asr.fitting import sample_validation
from sbkit.tasks.asr.predict import Transcriber
from sbkit.train.initialize import with_encoder_config
from tests.models.pretrained.folders import make_folder
from tests.runtime.bundles import ROOT, louder, make_run

RATE = 16_000
YAML = ROOT / "hparams/ctc_whisper.yaml"


@pytest.mark.slow
def test_every_way_to_log_probs_cuts_a_recording_alike(tmp_path: Path) -> None:
    make_folder(tmp_path / "whisper", "whisper", max_source_positions=1500)  # 30 s
    settings = {"pretrained": str(tmp_path / "whisper"), "output_folder": str(tmp_path / "run")}
    settings = with_encoder_config(read_document(YAML), settings)
    run = make_run(tmp_path / "run", YAML, louder, **settings)
    folder = tmp_path / "bundle"
    export_run(run, folder, formats=["onnx"])
    clip = (3000 * np.random.default_rng(0).standard_normal(50 * RATE)).astype(np.int16)
    soundfile.write(tmp_path / "clip.wav", clip, RATE)
    (tmp_path / "dev.csv").write_text("path,sentence\nclip.wav,hello there\n")

    bundle, threaded = load_bundle(folder, device="cpu"), load_in_thread(folder, device="cpu")
    onnx = load_bundle(folder, runtime="onnx", device="cpu")
    rows = prepare_user_set(bundle, tmp_path / "dev.csv")
    (sampled,) = sample_validation(bundle, {"dev": rows}, with_attention=False)
    transcriber = Transcriber(bundle=threaded)
    segments = [encoded for _, encoded in transcriber.encode(tmp_path / "clip.wav")]
    expected = np.concatenate([segment.log_probs for segment in segments])
    ways = {
        "bundle": bundle.encode([clip])[0],
        "batch": bundle.decoder_inputs([clip[:RATE], clip])[1],
        "thread": threaded.encode([clip])[0],
        "tune": sampled,
        "onnx": onnx.encode([clip])[0],
    }
    for name, way in ways.items():
        difference = np.abs(way.log_probs - expected).max()
        assert difference < (2e-3 if name == "onnx" else 1e-4), name
    for opened in (bundle, threaded, onnx):
        assert opened.transcribe([clip]) == bundle.transcribe([clip])
        assert opened.align([clip], ["hello there"]) == bundle.align([clip], ["hello there"])
    (text,) = bundle.transcribe([clip])
    whole = transcriber.transcribe(clip, RATE).text  # which has a space between segments
    assert whole.replace(" ", "") == text.replace(" ", "")
    transcriber.close()
