"""Third-party clients transcribe, speak and converse, if the extra `clients` is installed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import soundfile

from tests.runs import ROOT
from tests.runtime.tones import RATE, silence, speak, streaming_bundle
from tests.serve.server import RunningServer, ToneSpeaker, running_server

VERCEL = """
const {createOpenAI} = require("@ai-sdk/openai")
const {experimental_transcribe: transcribe} = require("ai")
const [url, file] = process.argv.slice(1)
const client = createOpenAI({baseURL: `${url}/v1`, apiKey: "a key"})
const audio = require("fs").readFileSync(file)
const providerOptions = {openai: {language: "en", include: ["logprobs"], temperature: 0}}
async function print(model) {
  console.log((await transcribe({model: client.transcription(model), audio, providerOptions})).text)
}
print("whisper-1").then(() => print("gpt-4o-transcribe"))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    tones = streaming_bundle(tmp_path)
    soundfile.write(
        tmp_path / "talk.wav", np.concatenate([speak(tones[1], "the dog"), silence(2.0)]), RATE
    )
    with running_server(tmp_path, tones=tones, speaker=ToneSpeaker, language="en") as server:
        yield server


def lines(*command: object) -> list[str]:
    """Return what a client prints, in a process of its own."""
    process = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.splitlines()


@pytest.mark.slow(40)
@pytest.mark.skipif(not find_spec("pipecat"), reason="needs the extra clients")
@pytest.mark.skipif(not find_spec("livekit"), reason="needs the extra clients")
def test_pipecat_and_livekit_transcribe_and_the_voice_assistant_answers(
    server: RunningServer, tmp_path: Path
) -> None:
    texts = ["the dog"] * 6
    texts += ["> the dog", "< the dog", "the dog"]  # recognized, answered, and the answer as heard
    command = (sys.executable, "-m", "tests.serve.stock_clients", server.url, tmp_path / "talk.wav")
    assert lines(*command) == texts


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("wyoming_openai"), reason="needs wyoming-openai, Python 3.12")
def test_bridge_of_home_assistant_transcribes(server: RunningServer, tmp_path: Path) -> None:
    script = Path(__file__).with_name("wyoming_client.py")
    assert lines(sys.executable, script, server.url, tmp_path / "talk.wav") == ["the dog"] * 2


@pytest.mark.slow
@pytest.mark.skipif(
    not (which("node") and os.environ.get("NODE_PATH")),
    reason="needs node, and NODE_PATH with `npm install ai@6 @ai-sdk/openai@3`",
)
def test_sdk_of_vercel_transcribes(server: RunningServer, tmp_path: Path) -> None:
    assert lines("node", "-e", VERCEL, server.url, tmp_path / "talk.wav") == ["the dog"] * 2
