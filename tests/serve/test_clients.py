"""Transcription requests as OpenAI's client, curl and front-ends send them."""

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import soxr

from sbkit.commands.cli import run
from sbkit.serve.api import OPENAI_MODELS
from sbkit.serve.app import TRANSCRIPTION_ROUTE
from sbkit.serve.recognition import RecognitionService
from sbkit.serve.tts import Voice
from tests.processes import run_fresh
from tests.runtime.tones import RATE, UnsureModel, speak, streaming_bundle, tone_bundle
from tests.runtime.tones import silence as pause
from tests.serve.server import RunningServer, running_server, silence, wait_for, wav

PAGES = Path(__file__).parents[2] / "docs/guide"
TEXT = "the quick brown fox"


def create(server: RunningServer, audio: bytes, **more: Any) -> Any:
    client: Any = server.openai.audio.transcriptions
    return client.create(**{"model": "whisper-1", "file": ("talk.wav", audio), **more})


def test_transcriptions_in_text_formats(server: RunningServer) -> None:
    for format, expected in (
        ("text", f"{TEXT}\n"),
        ("srt", f"1\n00:00:00,000 --> 00:00:02,240\n{TEXT}\n"),
        ("vtt", f"WEBVTT\n\n00:00:00.000 --> 00:00:02.240\n{TEXT}\n"),
    ):
        fields = {"response_format": format, "timestamp_granularities": ["word"]}  # without effect
        assert create(server, server.say(TEXT), **fields) == expected


def test_transcriptions_in_json_and_verbose_json(server: RunningServer) -> None:
    audio = server.say(TEXT)
    plain = create(server, audio, model="tones", timestamp_granularities=["word"])
    assert (plain.text, plain.usage.seconds) == (TEXT, 3)
    verbose = create(server, audio, response_format="verbose_json")
    assert (verbose.text, verbose.duration, verbose.words) == (TEXT, pytest.approx(2.28), None)
    (segment,) = verbose.segments
    assert (segment.text, segment.start, segment.end) == (TEXT, 0.0, pytest.approx(2.24))
    fields = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
    timed = create(server, audio, **fields)
    assert [word.word for word in timed.words] == TEXT.split()
    assert timed.words[1].start == pytest.approx(0.48)
    assert len(timed.segments) == 1
    fields = {"response_format": "verbose_json", "timestamp_granularities": "word"}
    assert len(server.post(audio, data=fields).json()["words"]) == 4


@pytest.mark.parametrize(("language", "text"), [("ksw", "我爱 北京"), ("zh", "我爱北京")])
def test_words_are_joined_as_transcripts_are_written(
    tmp_path: Path, language: str, text: str
) -> None:
    tones = streaming_bundle(tmp_path, "我爱 北京")
    with running_server(tmp_path, tones=tones, language=language) as server:
        audio = server.say("我爱 北京")
        for format in ("srt", "vtt"):
            assert create(server, audio, response_format=format).endswith(f"\n{text}\n")
        assert create(server, audio, response_format="verbose_json").segments[0].text == text


def test_transcription_events_add_up_to_the_text(server: RunningServer) -> None:
    texts = ["the dog jumps over a lazy fox " * 3] * 12
    spoken = [(speak(server.tokenizer, text.strip()), pause(1.0)) for text in texts]
    audio = np.concatenate([part for pair in spoken for part in pair])
    *deltas, completed = create(server, wav(audio), stream=True)
    assert {delta.type for delta in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 1
    assert completed.type == "transcript.text.done"
    assert completed.text == "".join(delta.delta for delta in deltas) == "".join(texts).strip()


def test_faults_are_logged_and_not_shown(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: RecognitionService, upload: Any, **__: object) -> AsyncIterator[str]:
        upload.close()
        yield "the "
        raise RuntimeError("The decoder was killed.")

    with monkeypatch.context() as patched:
        patched.setattr(RecognitionService, "transcribe", fail)
        with pytest.raises(openai.InternalServerError) as failed:
            create(server, silence(1.0))
        assert '"server_error"' in failed.value.response.text
        assert "decoder" not in failed.value.response.text
        with pytest.raises(openai.APIError, match="Internal server error"):
            list(create(server, silence(1.0), stream=True))
    wait_for(lambda: caplog.text.count("RuntimeError: The decoder was killed.") == 2)
    assert create(server, server.say("a fox")).text == "a fox"


def test_transcription_of_silence_is_empty(server: RunningServer) -> None:
    """Front-ends send silence first, to see whether the server is there."""
    assert create(server, silence(1.0)).text == ""
    *_, last = create(server, silence(1.0), stream=True)
    assert last.type == "transcript.text.done"


def test_channel_of_a_call_is_transcribed(server: RunningServer) -> None:
    call = np.stack([speak(server.tokenizer, text) for text in ("a fox", "a dog")], 1)
    soundfile.write(file := BytesIO(), call, RATE, format="WAV")
    for channel, text in enumerate(("a fox", "a dog")):
        answer = create(server, file.getvalue(), extra_body={"channel": channel})
        assert answer.text == text
    fields = {"response_format": "verbose_json", "extra_body": {"channel": "each"}}
    answer = create(server, file.getvalue(), timestamp_granularities=["word", "segment"], **fields)
    assert answer.text == "1: a fox\n2: a dog"
    for parts in (answer.words, answer.segments):
        assert {part.channel for part in parts} == {1, 2}
    with pytest.raises(openai.BadRequestError, match="must be false with `channel` each"):
        create(server, file.getvalue(), stream=True, extra_body={"channel": "each"})


def test_commands_and_scripts_of_pages_work(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their commands are parsed, and their blocks of Python run against a server as one script."""
    monkeypatch.chdir(tmp_path)
    Path("talk.mp3").write_bytes(server.say(TEXT))
    parsed: list[argparse.Namespace] = []
    monkeypatch.setattr("sbkit.commands.serve.serve", parsed.append)
    pages = [PAGES / "serve.md", PAGES / "serve-api.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    text = text.replace("http://127.0.0.1:8000", server.url)
    shell, scripts = (
        re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for language in ("sh", "python")
    )
    commands = [shlex.split(line) for line in "".join(shell).splitlines()]
    for command in commands:
        if command[:2] == ["sbkit", "serve"]:
            run(command[1:])
    assert {options.port for options in parsed} == {8000, 9000}
    (curl,) = (command for command in commands if command[0] == "curl")
    answer = subprocess.run(curl, capture_output=True, check=True)
    assert json.loads(answer.stdout)["text"] == TEXT
    resampled = soxr.resample(speak(server.tokenizer, TEXT) / np.float32(32768), 2, 3)
    soundfile.write("talk-24k.wav", resampled, 24_000)
    python = "".join(scripts).replace("my-model", "tones").replace("my-voice", "anna")
    process = run_fresh(python.replace("Hello there", TEXT), cwd=tmp_path)
    assert process.stdout == f"{TEXT}\n{TEXT}\n", process.stderr
    assert create(server, Path("hello.wav").read_bytes()).text == TEXT


def test_models_and_voices_are_listed(server: RunningServer) -> None:
    voice = {"id": "anna", "name": "anna", "language": "en"}
    assert server.get("/v1/audio/voices").json() == {"voices": [voice]}
    names = [model.id for model in server.openai.models.list()]
    assert names == ["tones", "anna", *OPENAI_MODELS[RecognitionService], *OPENAI_MODELS[Voice]]
    for name in ("tones", "gpt-4o-transcribe-2027-01-31"):
        assert server.openai.models.retrieve(name).owned_by == "sbkit"
    with pytest.raises(openai.NotFoundError, match="tones, anna, gpt-transcribe"):
        server.openai.models.retrieve("tones-2027")


def test_concurrent_clients_share_batches_and_get_their_own_texts(server: RunningServer) -> None:
    words = TEXT.split()
    texts = [f"{words[n % 4]} {words[n // 4]}" for n in range(16)]
    server.model.batches.clear()
    with ThreadPoolExecutor(17) as clients:
        with server.busy() as has_batch:
            clients.submit(create, server, server.say(TEXT))
            assert has_batch.wait(20)
            result = clients.map(lambda text: create(server, server.say(text)).text, texts)
            wait_for(lambda: server.metric("sbkit_queued_segments") == 16)
        assert list(result) == texts
    assert len(server.model.batches) < 17


def test_health_and_metrics_report_models_and_requests(server: RunningServer) -> None:
    content = server.get("/health/ready").json()
    assert content["status"] == "ready"
    assert [model["name"] for model in content["models"]] == ["tones", "anna"]
    for model in content["models"]:
        assert (model["declared"]["device"], model["effective"]["device"]) == ("auto", "cpu")
    good = f'sbkit_requests_total{{path="{TRANSCRIPTION_ROUTE}",status="200"}}'
    before = server.metric(good), server.metric("sbkit_audio_seconds_t")
    create(server, silence(2.0))
    assert server.metric(good) == before[0] + 1
    assert server.metric("sbkit_audio_seconds_t") == pytest.approx(before[1] + 2)
    assert server.metric("sbkit_request_seconds_count") > 0
    assert server.metric("process_resident_memory_bytes") > 0


def test_transcription_prompt_is_expected_by_the_decoder(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts start no further decoding processes: there is one for each core."""
    monkeypatch.setattr("sbkit.decoding.pool.MIN_FRAMES_FOR_POOL", 0)
    monkeypatch.setattr("sbkit.tasks.asr.bundle.usable_cores", lambda: 2)
    tones = tone_bundle(tmp_path, model_class=UnsureModel, lm_texts=[TEXT])
    audio, before = wav(speak(tones[1], "the fix")), len(active_children())
    with running_server(tmp_path, tones=tones) as unsure:
        plain = create(unsure, audio).text
        assert create(unsure, audio, prompt="We speak of: the fix, /etc/passwd").text == "the fix"
        assert create(unsure, audio, keywords=["the fix"]).text == "the fix"
        assert create(unsure, audio, prompt="/etc/hosts.txt").text == plain
        prompts = [f"the fix, {'abc'[n % 3]} {'def'[n // 3]}" for n in range(9)]
        with ThreadPoolExecutor(9) as clients:
            texts = clients.map(lambda prompt: create(unsure, audio, prompt=prompt).text, prompts)
            assert set(texts) == {"the fix"}
        assert len(active_children()) - before == 2
    assert create(server, server.say(TEXT), prompt="ignored, as it cannot help").text == TEXT
