"""The command `sbkit serve`: the same text as `sbkit transcribe`, and an orderly end."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import uvicorn
from openai import OpenAI

from sbkit.base import machine
from sbkit.base.errors import INTERRUPTED, SbkitError
from sbkit.base.machine import NvidiaDriver
from sbkit.bundle.bundle import BundleContents
from sbkit.commands.cli import run
from sbkit.runtime.runtimes import warn_once
from sbkit.serve.app import TRANSCRIPTION_ROUTE
from sbkit.tasks.asr.predict import Transcriber
from sbkit.tasks.tts.task import TtsTask
from tests import processes
from tests.runtime.tones import RATE, noise, tone_bundle
from tests.serve.server import ToneSpeaker, wait_for, wav
from tests.serve.test_realtime import say

NOISE = (3000 * np.random.default_rng(0).normal(size=60_000)).astype("<i2")  # at 24 kHz
NOISE_WAV = wav(NOISE, 24_000)


@contextmanager
def serving(*bundles_and_options: object) -> Iterator[tuple[httpx2.Client, Any]]:
    """Start the command; once it is ready, yield a client and the process."""
    words = ["-m", "sbkit", "serve", *bundles_and_options, "--port", "0", "--device", "cpu"]
    process = processes.Process(words)
    try:
        wait_for(lambda: "running on" in process.output()[1])
        (url,) = re.findall(r"serving \w+.* at (\S+)", process.output()[1])
        with httpx2.Client(base_url=url, timeout=120.0) as client:
            wait_for(lambda: client.get("/health/ready").status_code == 200)
            yield client, process
    finally:
        process.kill()


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_serve_answers_like_transcribe_and_stops_on_sigterm(exported: Path, runtime: str) -> None:
    clips = noise(1, 3, 4, 35)
    with Transcriber.load(exported, runtime=runtime, device="cpu") as transcriber:
        expected = [*map(str, transcriber.stream(clips, RATE))]
    with serving(exported, "--runtime", runtime) as (client, process):
        (ready,) = client.get("/health/ready").json()["models"]
        assert (ready["declared"]["runtime"], ready["effective"]["runtime"]) == (runtime, runtime)
        assert bool(ready["effective"]["nodes"]) == (runtime == "onnx")
        results = [
            client.post("/v1/audio/transcriptions", files={"file": wav(clip)}).json()["text"]
            for clip in clips
        ]
        assert results == expected
        assert any(results)
        process.terminate()
        assert process.wait(120) == 0, process.output()[1]
        lines = process.output()[1].splitlines()
        assert len(lines) == 2 + 4, lines


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_serve_gives_files_and_realtime_sessions_one_text(streaming: Path, runtime: str) -> None:
    with serving(streaming, "--runtime", runtime) as (client, process):
        (card,) = client.get("/card").json()["recognizers"]
        assert card["chunk_seconds"] == 0.64
        answer = client.post("/v1/audio/transcriptions", files={"file": NOISE_WAV})
        openai = OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
        with openai.realtime.connect() as session:
            assert say(session, NOISE.tobytes(), blocks=50) == answer.json()["text"] != ""


def ask_until_gone(url: httpx2.URL, audio: bytes) -> int:
    """Send requests until one gets no answer; return the number of the others."""
    num_answers = 0
    with suppress(httpx2.TransportError), httpx2.Client(base_url=url, timeout=120.0) as client:
        while True:
            assert client.post(TRANSCRIPTION_ROUTE, files={"file": audio}).status_code == 200
            num_answers += 1
    return num_answers


@pytest.mark.ddp
@pytest.mark.parametrize(
    ("kind", "code"),
    [(signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_serve_answers_what_it_logs_until_it_ends(plain_bundle: Path, kind: int, code: int) -> None:
    with serving(plain_bundle) as (client, process), ThreadPoolExecutor(8) as clients:
        counts = [clients.submit(ask_until_gone, client.base_url, NOISE_WAV) for _ in range(8)]
        wait_for(lambda: process.output()[1].count(" 200 ") > 24)
        os.kill(process.pid, kind)
        assert process.wait(20) == code
        num_answers = sum(count.result() for count in counts)
        num_logged = process.output()[1].count(f"POST {TRANSCRIPTION_ROUTE} 200 ")
    assert num_logged - 8 <= num_answers <= num_logged + 8
    assert "Traceback" not in process.output()[1]


def test_serve_refuses_a_model_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In speaches #255, a synthesizer silently ran on the CPU."""
    bundle, tokenizer, _ = tone_bundle(tmp_path)
    bundle.model.close()
    monkeypatch.setattr(TtsTask, "open_synthesizer", lambda *_, **__: ToneSpeaker(tokenizer))
    read = BundleContents(config=bundle.config, task=TtsTask())
    monkeypatch.setattr("sbkit.bundle.bundle.read_bundle", lambda *_, **__: read)
    for options, message in (
        (["--device", "cuda:0"], "cuda:0 .* cpu"),
        (["--runtime", "onnx", "--precision", "int8"], "int8 .* fp32"),
    ):
        with pytest.raises(SbkitError, match=message):
            run(["serve", str(tmp_path), "--port", "0", *options])


def test_auto_without_the_gpu_of_the_machine_is_told_in_log_and_health(
    plain_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "read_driver", lambda: NvidiaDriver(cuda="13.0", failure="none"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    warn_once.cache_clear()
    apps: list[Any] = []

    async def serve(server: uvicorn.Server, **_: object) -> None:
        apps.append(server.config.app)

    monkeypatch.setattr(uvicorn.Server, "serve", serve)
    for device, is_told in (("auto", True), ("cpu", False)):
        assert run(["serve", str(plain_bundle), "--port=0", "--device", device]) == 0
        client = httpx2.AsyncClient(transport=httpx2.ASGITransport(apps.pop()))
        response = asyncio.run(client.get("http://127.0.0.1/health/ready"))
        note = str(response.json()["note"])  # one sentence
        assert capsys.readouterr().err.count(note) == note.count(".") == is_told


def test_serve_refuses_unusable_addresses_names_and_keys(
    plain_bundle: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        with pytest.raises(SbkitError, match="cannot listen at"):
            run(["serve", str(plain_bundle), "--port", port])
    with pytest.raises(SbkitError, match="cannot listen at"):
        run(["serve", str(plain_bundle), "--host", "nowhere.invalid"])
    for host in ("0.0.0.0", "::"):
        with pytest.raises(SbkitError, match="--api-key-file"):
            run(["serve", str(plain_bundle), "--host", host, "--port", "0"])
    with pytest.raises(SbkitError, match="the same name"):
        run(["serve", str(plain_bundle), str(plain_bundle)])
    file = tmp_path / "keys"
    for content, message in (
        ("# none\n\n", "has no keys"),
        ("one\nschlüssel", "not printable ASCII"),  # clients send ü in one of three ways
        ("a\tkey", "not printable ASCII"),
    ):
        file.write_text(content, "utf-8")
        with pytest.raises(SbkitError, match=message):
            run(["serve", str(plain_bundle), "--port=0", "--api-key-file", str(file)])
