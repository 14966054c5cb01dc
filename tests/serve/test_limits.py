"""Requests that are bad, too many, too large or too slow; and the start and end of a server."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from sbkit.audio.decode import Signal
from sbkit.commands.cli import run
from sbkit.serve.middleware import Limits
from sbkit.serve.recognition import RecognitionService
from sbkit.tasks.tts.predict import Speech
from tests.runtime.tones import RATE
from tests.serve.server import RunningServer, ToneSpeaker, running_server, silence, wait_for

CLIP = silence(0.5)
BOUNDARY = {"Content-Type": "multipart/form-data; boundary=x"}
FORM_START = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'


def large_form() -> Iterator[bytes]:
    yield FORM_START
    for _ in range(30):
        yield bytes(100_000)


def form(**fields: str) -> dict[str, Any]:
    return {"audio": CLIP, "data": fields}


BAD_REQUESTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "nothing": (400, "`file` must be an audio file", {}),
    "no file": (400, "`file` must be an audio file", {"files": {"x": b"1"}}),
    "a file that is a field": (400, "but is text", {"data": {"file": "x"}, "files": {"x": CLIP}}),
    "two files": (400, "Too many files", {"files": [("file", CLIP), ("file", CLIP)]}),
    "a long file without a name": (400, "Part exceeded", form(file="x" * 1_500_000)),
    "no bytes": (422, "(wav, flac, ", {"audio": b""}),
    "half a WAV": (422, "0.2 s", {"audio": CLIP[: len(CLIP) // 2]}),
    "too long": (413, "more than 20 s of audio", {"audio": silence(20.1)}),
    "too large, in chunks": (413, "more than 2 MB", {"content": large_form(), "headers": BOUNDARY}),
    "another model": (404, "one of tones, gpt-", form(model="whisper-11")),
    "another language": (400, "`language` must be en, the model's, but is fr", form(language="fr")),
    "two channels": (400, "its number, counted from 0, or each, but is", form(channel="[0, 1]")),
    "no such channel": (422, "has no channel 1: it has 1, counted from 0", form(channel="1")),
    "another format": (400, "'json', 'text', 'srt',", form(response_format="xml")),
    "a misspelled field": (400, "`langauge` must be left out", form(langauge="en")),
    "a field in the URL": (
        400,
        "`language` has no effect in a URL",
        {"params": {"language": "fr"}},
    ),
    "a misspelled one": (400, "`langauge` has no effect in", {"params": {"langauge": "fr"}}),
    "events of subtitles": (400, "be false with srt", form(response_format="srt", stream="true")),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("limited")
    with running_server(folder, language="en", max_mb=2.0, max_seconds=20.0) as server:
        yield server


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_transcription_requests_get_a_clear_error(server: RunningServer, name: str) -> None:
    status, words, request = BAD_REQUESTS[name]
    answer = server.post(**request)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert server.post(server.say("a fox")).json()["text"] == "a fox"


def test_unknown_fields_and_parameters_are_accepted_and_listed(server: RunningServer) -> None:
    answer = server.post(CLIP, data={"user": "ü", "vad[x]": "1"}, params={"api-version": "\u4e00"})
    assert (answer.status_code, answer.json()["text"]) == (200, "")
    names = ("api-version", "user", "vad[x]")
    notes = [f"`{name}` is unknown here, and has no effect." for name in names]
    assert json.loads(answer.headers["X-Sbkit-Notes"]) == notes
    assert "X-Sbkit-Notes" not in server.post(CLIP, data={"temperature": "0"}).headers


def test_file_may_have_only_an_encoded_name(server: RunningServer) -> None:
    start = FORM_START.replace(b'filename="a.wav"', b"filename*=utf-8''b%C3%BCro.wav")
    content = start + server.say("a fox") + b"\r\n--x--\r\n"
    assert server.post(content=content, headers=BOUNDARY).json()["text"] == "a fox"


def test_target_may_name_the_server(server: RunningServer) -> None:
    host, port = server.client.base_url.host, server.client.base_url.port
    for target in (f"http://{host}:{port}/health", f"HTTP://{host}:{port}/health?x=1", "/health"):
        connection = HTTPConnection(host, port)
        connection.request("GET", target)
        assert json.load(connection.getresponse()) == {"status": "live"}
        connection.close()


def test_languages_are_understood_as_clients_write_them(server: RunningServer) -> None:
    tags = ("en-US", "en", "", "eng", "ENG_gb", "en_US.UTF-8", "auto", "AUTO", " ")
    for language in (*tags, "English", "English (US)", "Language.EN", "Language.EN_US"):
        assert server.post(CLIP, data={"language": language}).status_code == 200


def test_unknown_paths_methods_and_models_are_refused(server: RunningServer) -> None:
    meant = "/v1/audio/transcriptions"
    for path in ("/nowhere", "/v1/nowhere", meant[:-1], f"{meant}/", meant[3:], f"/v1{meant}"):
        answer = server.get(path)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "invalid_request_error")
        assert (f"Did you mean `{meant}`?" in error["message"]) == ("nowhere" not in path)
    assert server.get("/v1/audio/transcriptions").status_code == 405
    speech = server.client.post("/v1/audio/speech", json={"model": "tts-1", "input": "a"})
    assert (speech.status_code, "no model for this request" in speech.text) == (404, True)
    plain = server.get("/v1/realtime")  # as from a proxy that drops the header Upgrade
    assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket"), plain.text


def test_max_seconds_holds_against_a_false_header(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbkit.serve.recognition.declared_seconds", lambda _: 0.0)
    answer = server.post(silence(21.0))
    assert (answer.status_code, "20 s of audio" in answer.text) == (413, True)


def test_late_answers_that_have_begun_end_with_an_error_event_or_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    async def transcribe(_: RecognitionService, upload: Any, **__: object) -> AsyncIterator[str]:
        upload.close()
        yield "the "
        await asyncio.sleep(60)

    def blocks() -> Iterator[Signal]:
        yield np.zeros(RATE, np.float32)
        go_on.wait(60)

    with running_server(tmp_path, answer_seconds=0.5, speaker=ToneSpeaker) as server:
        with server.busy():
            answer = server.post(CLIP)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        monkeypatch.setattr(RecognitionService, "transcribe", transcribe)
        monkeypatch.setattr(ToneSpeaker, "stream", lambda *_, **__: Speech(blocks(), ()))
        client: Any = server.openai.audio
        with pytest.raises(openai.APIError, match=r"did not answer within 0\.5 s"):
            list(client.transcriptions.create(model="tones", file=("a.wav", CLIP), stream=True))
        fields = {"model": "anna", "voice": "alloy", "input": "a"}
        last_event = client.speech.create(**fields, stream_format="sse").text.splitlines()[-2]
        assert '"error": {"message": "The server did not answer within' in last_event
        with pytest.raises(openai.APIConnectionError):
            client.speech.create(**fields)
        go_on.set()
    assert "Traceback" not in caplog.text


def test_requests_wait_in_order_and_are_refused_when_the_queue_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running_server(tmp_path, max_concurrent=1, max_queue=2) as server,
        ThreadPoolExecutor(3) as clients,
    ):
        texts = ["a lazy dog", "a", "a dog"]
        with server.busy():
            for number, text in enumerate(texts, start=1):
                clients.submit(server.post, server.say(text))
                wait_for(lambda number=number: server.service.in_flight == number)
            with pytest.raises(openai.InternalServerError, match="3 requests are in") as refused:
                server.openai.audio.transcriptions.create(model="tones", file=("a.wav", CLIP))
            answer = refused.value.response
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            for path in ("/health", "/health/ready", "/metrics"):
                assert server.get(path).status_code == 200
            config = server.http_server.config
            assert (config.limit_concurrency or 0) >= 10 * (3 + 64)  # it refuses probes, too
            assert config.timeout_keep_alive > 60  # for which proxies reuse their connections
        wait_for(lambda: server.service.in_flight == 0)
        wait_for(lambda: caplog.text.count("s of audio") == 3)
        seconds = re.findall(r"200 .*, (\d\.\d) s of audio", caplog.text)
        assert seconds == [f"{0.12 * len(text):.1f}" for text in texts]
        assert server.post(CLIP).status_code == 200


def test_long_file_blocks_no_short_one(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, ThreadPoolExecutor(1) as clients:
        long = clients.submit(server.post, silence(600.0))
        wait_for(lambda: len(server.model.batches) > 1)
        assert server.post(server.say("a fox")).json()["text"] == "a fox"
        assert not long.done()
        assert long.result().json()["usage"]["seconds"] == 600


def test_help_of_each_limit_names_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["serve", "--help"])
    help = " ".join(capsys.readouterr().out.split("options:")[1].split())
    for name, value in asdict(Limits()).items():
        option = f"--{name.replace('_', '-')}"
        assert re.search(rf"{option} \w+ [^-]*\(default: {value:g}\)", help), option


def test_server_is_ready_once_its_models_are_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, warm_up = threading.Event(), RecognitionService.warm_up
    monkeypatch.setattr(RecognitionService, "warm_up", lambda self: go_on.wait() and warm_up(self))
    with running_server(tmp_path, is_ready=False) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/health/ready").json()["status"] == "warming up"
        assert server.post(CLIP).status_code == 503
        go_on.set()
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        assert sorted({clip for batch in server.model.batches for clip in batch}) == [1, 2, 5, 30]


def test_requests_in_flight_are_answered_before_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stop_seconds, status in ((20, 200), (0, 503)):
        monkeypatch.setattr("sbkit.serve.server.STOP_SECONDS", stop_seconds)
        with running_server(tmp_path) as server, ThreadPoolExecutor(1) as clients:
            with server.busy() as has_batch:
                queued = clients.submit(server.post, server.say("the last fox"))
                assert has_batch.wait(20)
                server.http_server.should_exit = True
                if status == 503:
                    assert queued.result().status_code == 503
            assert queued.result().status_code == status
            server.thread.join(20)
            assert not server.thread.is_alive()


def test_failed_warm_up_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def fail(_: object) -> None:
        raise MemoryError("none is left")

    monkeypatch.setattr("sbkit.serve.recognition.RecognitionService.warm_up", fail)
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: errors.append(failure.exc_value))
    with running_server(tmp_path, is_ready=False) as server:
        server.thread.join(20)
    assert [type(error) for error in errors] == [MemoryError]
    assert f"serving tones at {server.url}" in caplog.messages
