"""Third-party clients transcribe, speak and converse, where they are installed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from tests.runs import ROOT
from tests.runtime.tones import silence, speak
from tests.serve.server import RunningServer, wav

VERCEL = """
const {createOpenAI} = require("@ai-sdk/openai")
const [url, model] = process.argv.slice(1)
const client = createOpenAI({baseURL: `${url}/v1`, apiKey: "a key"})
require("ai").experimental_transcribe({
  model: client.transcription(model),
  audio: require("fs").readFileSync(0),
  providerOptions: {openai: {language: "en", include: ["logprobs"], temperature: 0}},
}).then(({text}) => process.stdout.write(text))
"""


@pytest.mark.slow(40)
@pytest.mark.skipif(not find_spec("pipecat"), reason="needs the extra clients")
@pytest.mark.skipif(not find_spec("livekit"), reason="needs the extra clients")
def test_pipecat_and_livekit_transcribe_and_the_assistant_answers(
    server: RunningServer,
) -> None:
    command = [sys.executable, "-m", "tests.serve.stock_clients", server.url]
    clip = wav(np.append(speak(server.tokenizer, "the dog"), silence(2.0)))
    process = subprocess.run(command, cwd=ROOT, input=clip, capture_output=True, timeout=300)
    texts = ["the dog"] * 6
    texts += ["> the dog", "< the dog", "the dog"]  # recognized, answered, and the answer as heard
    assert process.stdout.decode().splitlines() == texts, process.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif("NODE_PATH" not in os.environ, reason="needs npm install ai @ai-sdk/openai@3")
@pytest.mark.parametrize("model", ["whisper-1", "gpt-4o-transcribe"])
def test_sdk_of_vercel_transcribes(server: RunningServer, model: str) -> None:
    command, audio = ["node", "-e", VERCEL, server.url, model], server.say("the dog")
    process = subprocess.run(command, input=audio, capture_output=True, timeout=120)
    assert process.stdout == b"the dog", process.stderr
