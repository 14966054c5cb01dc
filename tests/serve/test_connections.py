"""Connections that are idle, slow, ambiguous, too many or of other sites; and faults."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as open_socket

from tests.serve.server import RunningServer, read_until, refusal, running_server, silence, wait_for
from tests.serve.test_limits import CLIP
from tests.serve.test_realtime import until

SITE = "https://talk.example.com"
TRUSTED = {"Origin": SITE, "Host": "talk.example.com"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("site"), origins=[SITE], max_seconds=20) as server:
        yield server


def read(stream: socket.socket) -> bytes:
    """Read until the server closes."""
    return b"".join(iter(lambda: stream.recv(10_000), b""))


def ask(stream: socket.socket, content: bytes, end: bytes) -> bytes:
    """Send a request, and read until the end of its answer."""
    stream.sendall(content)
    return read_until(stream, end)


def request(audio: bytes) -> bytes:
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body += audio + b"\r\n--x--\r\n"
    lines = ["POST /v1/audio/transcriptions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: multipart/form-data; boundary=x", "", ""]
    return "\r\n".join(lines).encode() + body


def test_server_closes_connections_that_send_no_header_in_time(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbkit.serve.server.HEADER_SECONDS", 0.3)
    with server.connect() as idle, server.connect() as slow, server.connect() as second:
        for _ in range(2):
            ask(second, LIVE_REQUEST, b'"live"')
        for stream in (slow, second):
            with pytest.raises(OSError):
                for _ in range(10_000):
                    stream.sendall(b"G")
                    if not stream.recv(100):
                        raise ConnectionResetError
        assert idle.recv(100) == b""


def test_server_limits_connections(tmp_path: Path) -> None:
    with running_server(tmp_path, max_connections=3) as server, ExitStack() as stack:
        assert server.http_server.config.timeout_keep_alive > 60  # for which proxies reuse theirs
        wait_for(lambda: not server.http_server.server_state.connections)
        streams = [stack.enter_context(server.connect()) for _ in range(3)]
        wait_for(lambda: len(server.http_server.server_state.connections) == 3)
        with server.connect() as refused:
            refused.sendall(LIVE_REQUEST)
            assert read(refused).startswith(b"HTTP/1.1 503 ")
        streams[0].sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b'"live"' in read(streams[0])
        assert server.get("/health/live").status_code == 200


def test_server_runs_no_request_that_another_one_hides(server: RunningServer) -> None:
    """A proxy that goes by the length forwards the second request unseen, as a body."""
    lengths = b"Content-Length: 44\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with server.connect() as stream:
        stream.sendall(LIVE_REQUEST[:-2] + lengths + LIVE_REQUEST)
        answer = read(stream)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"live"' not in answer


def test_server_keeps_the_connection_after_a_fault_and_logs_it(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as stream, monkeypatch.context() as patched:
        patched.setattr(server.model, "encode", lambda clips: 1 // 0)
        answer = ask(stream, request(CLIP), b"}}")
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b'"server_error"' in answer
        assert b"ZeroDivisionError" not in answer
        patched.undo()
        assert ask(stream, request(CLIP), b"}}").startswith(b"HTTP/1.1 200 ")
    assert "ZeroDivisionError" in caplog.text


LIVE_REQUEST = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
HOSTS = {
    "127.0.0.1:8000": 200,
    "[::1]:8000": 200,
    "sbkit:8000": 200,
    "app.localhost": 200,
    "TALK.example.com": 200,
    "evil.example.com:8000": 403,
    "127.0.0.1.evil.com": 403,
    "evil.talk.example.com": 403,
}
ORIGINS = {
    None: 200,
    SITE: 200,
    "http://localhost:3000": 403,
    "http://talk.example.com": 403,
    "https://evil.example.com": 403,
    "null": 403,
}


def test_origin_guard_refuses_pages_of_other_sites(server: RunningServer) -> None:
    for host, status in HOSTS.items():
        for path in ("/", "/card", "/health/live", "/metrics", "/v1/models"):
            answer = server.client.get(path, headers={"Host": host})
            assert (answer.status_code, host) == (status, host)
    url = f"{server.socket_url}/v1/realtime"
    for origin, status in {server.url: 200, server.url.upper(): 200, **ORIGINS}.items():
        answer = server.post(CLIP, headers={} if origin is None else {"Origin": origin})
        assert (answer.status_code, origin) == (status, origin)
        if status == 403:
            assert f"--allow-origin {origin}" in answer.json()["error"]["message"]
        socket_status = 200
        try:
            open_socket(url, origin=origin).close()  # type: ignore[arg-type]
        except InvalidStatus as refused:
            socket_status = refused.response.status_code
        assert (socket_status, origin) == (status, origin)


def test_allowed_origins_may_read_answers(server: RunningServer, tmp_path: Path) -> None:
    preflight = {"Access-Control-Request-Method": "POST"}
    preflight |= {"Access-Control-Request-Headers": "authorization"}
    answer = server.client.options("/v1/audio/speech", headers=TRUSTED | preflight)
    assert answer.headers["access-control-allow-headers"] == "authorization"
    headers = server.post(CLIP, headers=TRUSTED).headers
    assert headers["access-control-allow-origin"] == SITE
    assert headers["access-control-expose-headers"] == "X-Sbkit-Notes"
    with running_server(tmp_path, origins=["*"]) as open_to_all:
        headers = {"Host": "any.example.com", "Origin": "https://any.example.org"}
        answer = open_to_all.post(CLIP, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_log_has_a_line_per_request_without_contents(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.post(silence(2.0), data={"prompt": "secret"}, headers={"Authorization": "Bearer secret"})
    server.post(silence(1.0), data={"stream": "true", "model": "whisper-1"})
    server.get("/v1/no%0Awhere?key=secret")
    server.get("/health/ready")
    with server.openai.realtime.connect() as session:
        until(session, "created")
    for path in ("/v1/realtime?model=x", "/v1/nowhere", "/nowhere"):
        answer = refusal(server.socket_url + path)
        assert answer.status_code == 404
        assert json.loads(answer.body)["error"]["message"]

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "sbkit.serve"]

    wait_for(lambda: len(logged()) == 7)
    lines = logged()
    times = [line.split(" ")[3] for line in lines]
    assert [line.replace(f" {time} s", "") for line, time in zip(lines, times, strict=True)] == [
        "POST /v1/audio/transcriptions 200, 2.0 s of audio, model tones",
        "POST /v1/audio/transcriptions 200, 1.0 s of audio, model tones",
        r"GET /v1/no\nwhere 404",
        "GET /v1/realtime 101, 0.0 s of audio, model tones",
        "GET /v1/realtime 404",
        "GET /v1/nowhere 404",
        "GET /nowhere 404",
    ]


def test_realtime_session_has_a_longest_duration(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, max_session_seconds=0.5) as server,
        server.openai.realtime.connect() as session,
        pytest.raises(ConnectionClosed) as closed,
    ):
        while True:
            session.input_audio_buffer.clear()
            event: Any = session.recv()
            assert event.type in ("session.created", "input_audio_buffer.cleared")
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, "too long" in closed.value.rcvd.reason) == (1001, True)
