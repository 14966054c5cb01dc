"""Who may use the server: its keys, names and pages; and requests that hide others."""

import json
import socket
from collections.abc import Iterator
from hmac import compare_digest
from pathlib import Path
from typing import Any

import pytest

from sbkit.serve import middleware
from tests.serve.server import RunningServer, handshake, running_server, silence, wait_for

CLIP = silence(0.5)
SITE = "https://talk.example.com"
OPEN_PATHS = ("/", "/health", "/health/ready", "/metrics")
KEYS = {
    "Bearer one": 200,
    "bearer two": 200,
    "Bearer on": 401,
    "Bearer ones": 401,
    "Basic one": 401,
    "Bearer": 401,
    "": 401,
}
HOSTS = {
    "127.0.0.1:8000": 200,
    "[::1]:8000": 200,
    "localhost": 200,
    "app.localhost": 200,
    "TALK.example.com": 200,
    "evil.example.com:8000": 400,
    "127.0.0.1.evil.com": 400,
    "evil.talk.example.com": 400,
}
ORIGINS = {
    SITE: 200,
    "http://localhost:3000": 403,
    "http://talk.example.com": 403,
    "https://evil.example.com": 403,
    "null": 403,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("site"), origins=[SITE]) as server:
        yield server


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("keys"), keys=["one", "two"]) as server:
        yield server


def statuses(server: RunningServer, **headers: str) -> list[int]:
    """Return the statuses of a file and of a session with these headers."""
    session = handshake(server, additional_headers=headers).status_code
    return [server.post(CLIP, headers=headers).status_code, 200 if session == 101 else session]


def test_only_valid_keys_are_admitted(closed: RunningServer) -> None:
    for key, status in KEYS.items():
        assert (key, statuses(closed, Authorization=key)) == (key, [status, status])
    for key, status, chosen in (("two", 101, "realtime"), ("on", 401, None)):
        protocols: Any = ["realtime", f"openai-insecure-api-key.{key}"]
        answer = handshake(closed, subprotocols=protocols)
        assert answer.status_code == status
        assert answer.headers.get("Sec-WebSocket-Protocol") == chosen
    assert [closed.get(path).status_code for path in OPEN_PATHS] == [200] * 4
    for path in ("/v1/models", "/card", "/nowhere"):
        assert closed.get(path).json()["error"]["code"] == "invalid_api_key"


def test_each_key_is_compared_in_constant_time(
    closed: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[tuple[int, int]] = []

    def compare(own: bytes, valid: bytes) -> bool:
        lengths.append((len(own), len(valid)))
        return compare_digest(own, valid)

    monkeypatch.setattr(middleware, "compare_digest", compare)
    for key in ("one", "a long wrong key"):
        closed.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert lengths == [(32, 32)] * 4  # two keys for each request, also after one that fits


def test_names_and_pages_of_other_sites_are_refused(
    server: RunningServer, closed: RunningServer
) -> None:
    for host, status in HOSTS.items():
        for path in (*OPEN_PATHS, "/card", "/v1/models"):
            answer = server.client.get(path, headers={"Host": host})
            assert (host, path, answer.status_code) == (host, path, status)
    for origin, status in {server.url: 200, server.url.upper(): 200, **ORIGINS}.items():
        assert (origin, statuses(server, Origin=origin)) == (origin, [status, status])
    refused = server.post(CLIP, headers={"Origin": "http://a.eu"})
    assert "--allow-origin http://a.eu" in refused.json()["error"]["message"]
    headers = {"Authorization": "Bearer one", "Host": "asr.lan"}  # no other page has a key
    assert closed.post(CLIP, headers=headers).status_code == 200
    assert closed.post(CLIP, headers=headers | {"Origin": "http://a.eu"}).status_code == 403


def test_allowed_origins_may_read_answers(server: RunningServer, tmp_path: Path) -> None:
    trusted = {"Origin": SITE, "Host": "talk.example.com"}
    preflight = {"Access-Control-Request-Method": "POST"}
    preflight |= {"Access-Control-Request-Headers": "authorization"}
    answer = server.client.options("/v1/audio/speech", headers=trusted | preflight)
    assert answer.headers["access-control-allow-headers"] == "authorization"
    for audio, status in ((CLIP, 200), (None, 400)):
        answer = server.post(audio, headers=trusted)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, SITE)
        assert answer.headers["access-control-expose-headers"] == "X-Sbkit-Notes"
    with running_server(tmp_path, origins=["*"]) as open_to_all:
        headers = {"Host": "any.example.com", "Origin": "https://any.example.org"}
        answer = open_to_all.post(CLIP, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_no_request_runs_that_another_one_hides(server: RunningServer) -> None:
    """A proxy that goes by the length forwards the second request unseen, as a body."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lengths = b"Content-Length: 52\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as stream:
        stream.sendall(request[:-2] + lengths + request)
        answer = b"".join(iter(lambda: stream.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"live"' not in answer


def test_messages_are_never_compressed(server: RunningServer) -> None:
    """A small compressed message could fill the memory."""
    answer = handshake(server, compression="deflate")
    assert (answer.status_code, "Sec-WebSocket-Extensions" in answer.headers) == (101, False)


def test_log_has_a_line_per_request_without_contents(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.post(silence(2.0), data={"prompt": "secret"}, headers={"Authorization": "Bearer secret"})
    server.post(silence(1.0), data={"stream": "true", "model": "whisper-1"})
    server.get("/v1/no%0Awhere?key=secret")
    server.get("/health/ready")
    assert handshake(server).status_code == 101
    for path, message in (("/v1/realtime?model=x", "but is x."), ("/nowhere", "has no path")):
        answer = handshake(server, path)
        assert answer.status_code == 404
        assert message in json.loads(answer.body)["error"]["message"]

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "sbkit.serve"]

    wait_for(lambda: len(logged()) == 6)
    lines = logged()
    times = [line.split(" ")[3] for line in lines]
    assert [line.replace(f" {time} s", "") for line, time in zip(lines, times, strict=True)] == [
        "POST /v1/audio/transcriptions 200, 2.0 s of audio, model tones",
        "POST /v1/audio/transcriptions 200, 1.0 s of audio, model tones",
        r"GET /v1/no\nwhere 404",
        "GET /v1/realtime 101, 0.0 s of audio, model tones",
        "GET /v1/realtime 404",
        "GET /nowhere 404",
    ]
