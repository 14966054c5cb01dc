"""Bad requests, too many, too large and too slow, get a clear error; other requests continue."""

import asyncio
import gc
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from sbkit.audio.decode import Signal
from sbkit.base.errors import SbkitError
from sbkit.commands.cli import run
from sbkit.serve.app import TRANSCRIPTIONS
from sbkit.serve.middleware import STOPPING, WARMING, ApiKeys, Limits
from sbkit.serve.recognition import RecognitionService
from sbkit.tasks.synthesis.predict import Speech
from tests.runtime.tones import RATE
from tests.serve.server import (
    RunningServer,
    ToneSpeaker,
    read_until,
    running_server,
    silence,
    wait_for,
)

CLIP = silence(0.5)
BOUNDARY = {"Content-Type": "multipart/form-data; boundary=x"}
FORM_START = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
LOST_REQUESTS = f'sbkit_requests_total{{path="{TRANSCRIPTIONS}",status="499"}}'


def large_form() -> Iterator[bytes]:
    yield FORM_START
    for _ in range(30):
        yield bytes(100_000)


def form(**fields: str) -> dict[str, Any]:
    return {"audio": CLIP, "data": fields}


BAD_REQUESTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "nothing": (415, "must be multipart/form-data, but is of no type", {}),
    "no file": (400, "`file` must be an audio file", {"files": {"x": b"1"}}),
    "a file that is a field": (400, "but is a text", {"data": {"file": "x"}, "files": {"x": CLIP}}),
    "two files": (400, "Too many files", {"files": [("file", CLIP), ("file", CLIP)]}),
    "no form": (400, "Invalid multipart", {"content": b"rubbish", "headers": BOUNDARY}),
    "a long file without a name": (400, "curl: -F file=@talk.wav", form(file="x" * 1_500_000)),
    "no bytes": (422, "is not recognized as audio", {"audio": b""}),
    "half a WAV": (422, "it declares 0.5 s, has 0.2 s", {"audio": CLIP[: len(CLIP) // 2]}),
    "too long": (413, "more than 20 s of audio", {"audio": silence(20.1)}),
    "too large": (413, "more than 2 MB", {"audio": bytes(2_100_000)}),
    "too large, in chunks": (413, "more than 2 MB", {"content": large_form(), "headers": BOUNDARY}),
    "another model": (404, "one of tones, gpt-", form(model="whisper-11")),
    "another language": (400, "`language` must be en, the model's, but is fr", form(language="fr")),
    "two channels": (400, "`channel` must be a valid integer", form(channel="[0, 1]")),
    "no such channel": (422, "has no channel 1: it has 1, counted from 0", form(channel="1")),
    "another format": (400, "'json', 'text', 'srt',", form(response_format="xml")),
    "an unknown field": (400, "`nonsense` must be left out", form(nonsense="1")),
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


def test_languages_are_understood_as_clients_write_them(server: RunningServer) -> None:
    tags = ("en-US", "en", "", "eng", "ENG_gb", "en_US.UTF-8", "auto", "AUTO", " ")
    for language in (*tags, "English", "English (US)", "Language.EN", "Language.EN_US"):
        assert server.post(CLIP, data={"language": language}).status_code == 200


def test_unknown_paths_and_methods_are_refused(server: RunningServer) -> None:
    meant = "/v1/audio/transcriptions"
    for path in ("/nowhere", "/v1/nowhere", meant[:-1], f"{meant}/", meant[3:], f"/v1{meant}"):
        answer = server.get(path)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (404, "invalid_request_error")
        assert (f"Did you mean `{meant}`?" in error["message"]) == ("nowhere" not in path)
    for path in ("/health", "/healthz/", "/readyz", "/v1/health", "/health-check", "/ping"):
        assert "Did you mean `/health/ready`?" in server.get(path).json()["error"]["message"]
    assert server.get("/v1/audio/transcriptions").status_code == 405
    plain = server.get("/v1/realtime")  # as from a proxy that drops the header Upgrade
    assert (plain.status_code, plain.headers["upgrade"]) == (426, "websocket"), plain.text


def test_max_seconds_holds_against_a_false_header(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbkit.serve.recognition.declared_seconds", lambda _: 0.0)
    answer = server.post(silence(21.0))
    assert (answer.status_code, "20 s of audio" in answer.text) == (413, True)


HEADER = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
    b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
)


def test_slow_bodies_and_late_answers_time_out(tmp_path: Path) -> None:
    with running_server(tmp_path, receive_seconds=0.2, answer_seconds=1.5) as server:
        with server.connect() as slow:
            slow.sendall(HEADER + FORM_START)
            content = read_until(slow, b"}}")
            assert content.startswith(b"HTTP/1.1 408")
            assert b"within 0.2 s" in content
        with server.busy():
            answer = server.post(CLIP)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert server.post(CLIP).status_code == 200


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


def test_admission_limits_requests_in_flight(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, max_concurrent=1, max_queue=2) as server,
        ThreadPoolExecutor(3) as clients,
    ):
        texts = ["a dog", "a fox", "a"]
        with server.busy():
            first = [clients.submit(server.post, server.say(text)) for text in texts]
            wait_for(lambda: server.state.in_flight == 3)
            with pytest.raises(openai.RateLimitError, match="3 requests are in flight") as refused:
                server.openai.audio.transcriptions.create(model="tones", file=("a.wav", CLIP))
            assert refused.value.response.headers["retry-after"] == "1"
        assert [future.result().json()["text"] for future in first] == texts
        assert server.post(CLIP).status_code == 200
        wait_for(lambda: server.state.in_flight == 0)
        server.state.in_flight = 1000  # far above the limit
        assert server.post(CLIP).status_code == 429


def test_help_of_each_limit_names_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["serve", "--help"])
    help = " ".join(capsys.readouterr().out.split("options:")[1].split())
    for name, value in asdict(Limits()).items():
        option = f"--{name.replace('_', '-')}"
        assert re.search(rf"{option} \w+ [^-]*\(default: {value:g}\)", help), option


# httpx2 leaves the sockets of timeouts to the collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_lost_clients_cost_nothing_more(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, ThreadPoolExecutor(2) as clients:
        with server.busy() as has_batch:
            first = clients.submit(server.post, server.say("fox"))
            assert has_batch.wait(20)
            for data in ({}, {"stream": "true"}):
                with pytest.raises(Exception, match="timed out"):
                    server.post(silence(3.0), data=data, timeout=0.3)
            wait_for(lambda: server.metric(LOST_REQUESTS) == 2)
        assert first.result().json()["text"] == "fox"
        assert server.post(server.say("dog")).json()["text"] == "dog"
        assert not [batch for batch in server.model.batches if batch == [3.0]]
    gc.collect()


def test_key_guard_admits_only_valid_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    with running_server(tmp_path, keys=["# staff", "one", "", "  #two", "two"]) as server:
        for key, status in (("Bearer one", 200), ("bearer two", 200), ("Bearer on", 401)):
            assert server.post(CLIP, headers={"Authorization": key}).status_code == status
        for key in ("Basic one", "Bearer # staff", "Bearer #two", "Bearer"):
            assert server.post(CLIP, headers={"Authorization": key}).status_code == 401
        for host in ("asr.lan", "speech.default.svc.cluster.local:8000", "192.168.1.7"):
            headers = {"Authorization": "Bearer one", "Host": host}
            assert server.post(CLIP, headers=headers).status_code == 200
            assert server.post(CLIP, headers=headers | {"Origin": "http://a.eu"}).status_code == 403
        assert server.post(CLIP).status_code == 401
        for path in ("/v1/models", "/card"):
            assert server.get(path).json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.openai.models.list()
        assert server.get("/health/ready").status_code == 200
        for key in ("schlüssel", "a\tkey", "a\x7fkey"):  # clients send ü in one of three ways
            caplog.clear()
            file.write_text(key, "utf-8")
            server.http_server.read_keys()
            assert "printable ASCII" in caplog.text
        file.write_text("# none\n\n")
        server.http_server.read_keys()
        assert "has no keys" in caplog.text
        assert server.post(CLIP, headers={"Authorization": "Bearer one"}).status_code == 200
    assert "two" not in caplog.text
    with pytest.raises(SbkitError, match="has no keys"):
        ApiKeys(file)


def test_ready_between_warm_up_and_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, warm_up = threading.Event(), RecognitionService.warm_up
    monkeypatch.setattr(RecognitionService, "warm_up", lambda self: go_on.wait() and warm_up(self))
    with (
        running_server(tmp_path, phase=WARMING, drain_seconds=2.0) as server,
        ThreadPoolExecutor(2) as clients,
    ):
        assert server.get("/health/ready").json()["status"] == "warming up"
        assert server.post(CLIP).status_code == 503
        go_on.set()
        wait_for(lambda: server.get("/health/ready").status_code == 200)
        assert sorted({clip for batch in server.model.batches for clip in batch}) == [1, 2, 5, 30]
        with server.busy():
            queued = clients.submit(server.post, server.say("the last fox"))
            wait_for(lambda: server.state.in_flight)
            server.http_server.handle_exit(signal.SIGTERM, None)
            ready = server.get("/health/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            assert ready.headers["connection"] == "close"
            during_drain = clients.submit(server.post, server.say("a late dog"))
            wait_for(lambda: server.state.in_flight == 2)
            assert not server.state.stopping.is_set()
            wait_for(lambda: server.state.phase == STOPPING)
            assert server.get("/health/live").status_code == 200
            refused = server.post(CLIP)
            assert (refused.status_code, "is stopping" in refused.text) == (503, True)
        assert queued.result().json()["text"] == "the last fox"
        assert during_drain.result().json()["text"] == "a late dog"
        server.thread.join(120)
        assert not server.thread.is_alive()


def test_requests_beyond_the_grace_time_get_503(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, drain_seconds=3600.0) as server,
        ThreadPoolExecutor(1) as clients,
        server.busy(),
    ):
        queued = clients.submit(server.post, server.say("a fox"))
        wait_for(lambda: server.state.in_flight)
        for _ in range(2):  # the second signal ends the drain time and the grace time
            server.http_server.handle_exit(signal.SIGTERM, None)
        assert queued.result().status_code == 503


def test_failed_warm_up_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def fail(_: object) -> None:
        raise MemoryError("none is left")

    monkeypatch.setattr("sbkit.serve.recognition.RecognitionService.warm_up", fail)
    with running_server(tmp_path, phase=WARMING) as server:
        server.thread.join(120)
        with pytest.raises(MemoryError):
            server.http_server.exit_code()
    assert f"serving tones at {server.url}" in caplog.messages
