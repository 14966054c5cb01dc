"""Third-party clients transcribe, speak and converse, if the extra `clients` is installed."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.runs import ROOT
from tests.runtime.tones import RATE, silence, speak, streaming_bundle
from tests.serve.server import ToneSpeaker, running_server


@pytest.mark.slow(40)
@pytest.mark.skipif(not find_spec("pipecat"), reason="needs the extra clients")
@pytest.mark.skipif(not find_spec("livekit"), reason="needs the extra clients")
def test_pipecat_and_livekit_transcribe_and_the_voice_assistant_answers(tmp_path: Path) -> None:
    tones, file = streaming_bundle(tmp_path), tmp_path / "talk.wav"
    soundfile.write(file, np.concatenate([speak(tones[1], "the dog"), silence(2.0)]), RATE)
    with running_server(tmp_path, tones=tones, speaker=ToneSpeaker, language="en") as server:
        command = [sys.executable, "-m", "tests.serve.stock_clients", server.url, str(file)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    texts = ["the dog"] * 6
    texts += ["> the dog", "< the dog", "the dog"]  # recognized, answered, and the answer as heard
    assert process.stdout.splitlines() == texts, process.stderr[-3000:]
