"""What the server does alone and behind tools/nginx.conf, as the table of its page says."""

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from errno import ENOSPC
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.processes import free_port
from tests.runs import ROOT
from tests.runtime.tones import streaming_bundle
from tests.serve.server import RunningServer, running_server, silence, wait_for

PAGE = (ROOT / "docs/guide/serve.md").read_text("utf-8")
TABLE = {  # the outcomes by case and by side
    case: {"alone": alone, "nginx": behind}
    for case, alone, behind in re.findall(r"^\| (.+) \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE)
}
CONFIGURATION = (ROOT / "tools/nginx.conf").read_text("utf-8")
SHORT = {"10s": "500ms", "30s": "500ms", "25m": "2m", "sbkit 100": "sbkit 2"}
MARKS = [pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx"), pytest.mark.slow]
KEY = "Authorization: Bearer one\r\n"
POST = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n{KEY}"
HEALTH = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
FORM = "Content-Type: multipart/form-data; boundary=x\r\n"
PART = '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


@contextmanager
def nginx(folder: Path, upstream: int) -> Iterator[int]:
    """Run nginx with tools/nginx.conf, without TLS and with short times; yield its port."""
    port = free_port()
    text = re.sub(r" +ssl_.*\n", "", CONFIGURATION).replace("443 ssl", f"127.0.0.1:{port}")
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{upstream}")
    for long, short in SHORT.items():
        assert long in text
        text = text.replace(long, short)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in kinds)
    http = f"access_log off; {folders} {text}"
    file = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    file.write_text(f"{user} pid {folder}/pid; events {{}} http {{ {http} }}")
    command = ["nginx", "-p", folder, "-c", file, "-e", folder / "errors", "-g", "daemon off;"]
    with subprocess.Popen(command) as process:
        try:
            wait_for(lambda: ask(port, HEALTH) != "closed")
            yield port
        finally:
            process.terminate()


def ask(port: int, content: str | bytes) -> str:
    """Send bytes; return the status of the answer, or whether the server waits or closes."""
    content = content if isinstance(content, bytes) else content.encode()
    try:
        with socket.create_connection(("127.0.0.1", port), 1.5) as stream:
            with suppress(ConnectionError):  # it may answer before it has read everything
                stream.sendall(content)
            return str(stream.recv(1000).split()[1], "ascii")
    except TimeoutError:
        return "waits"
    except (IndexError, ConnectionError):
        return "closed"


def form(audio: bytes, header: str = "") -> bytes:
    body = PART.encode() + audio + b"\r\n--x--\r\n"
    return f"{POST}{FORM}{header}Content-Length: {len(body)}\r\n\r\n".encode() + body


def many_connections(server: RunningServer, port: int) -> str:
    with server.busy(), ThreadPoolExecutor(2) as clients:
        for _ in range(2):
            clients.submit(ask, port, form(silence(0.5)))
        wait_for(lambda: server.service.in_flight == 2)
        return ask(port, HEALTH)


def full_queue(server: RunningServer, port: int) -> str:
    server.service.in_flight = 1000
    return ask(port, form(silence(0.5)))


def full_disk(server: RunningServer, port: int) -> str:
    def write(*_: object) -> int:
        raise OSError(ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpooledTemporaryFile, "write", write)
        return ask(port, form(silence(0.5)))


def lost_client(server: RunningServer, port: int) -> str:
    lost = 'sbkit_requests_total{path="/v1/audio/transcriptions",status="499"}'
    with server.busy(), socket.create_connection(("127.0.0.1", port)) as stream:
        stream.sendall(form(silence(0.5)))
        wait_for(lambda: server.service.in_flight)
        stream.close()
        wait_for(lambda: server.metric(lost) == 1)
    return "499"


def open_session(port: int, **options: Any) -> ClientConnection:
    headers = {"Authorization": "Bearer one"}
    url = f"ws://127.0.0.1:{port}/v1/realtime"
    return connect(url, additional_headers=headers, open_timeout=60, **options)


def unread_answers(server: RunningServer, port: int) -> str:
    """Send events whose answers fill all buffers."""
    event = json.dumps({"event_id": "x" * 1_000_000})  # it comes back in an error
    with suppress(ConnectionClosed), open_session(port, max_queue=1) as session:
        while True:
            session.send(event)
    return "closed"


def stop(server: RunningServer, port: int) -> str:
    with open_session(port) as session:
        session.recv()
        server.http_server.should_exit = True
        with pytest.raises(ConnectionClosed) as closed:
            session.recv()
    server.thread.join(20)
    assert not server.thread.is_alive() and closed.value.rcvd is not None
    return str(closed.value.rcvd.code)


def ended(server: RunningServer, port: int) -> str:
    server.http_server.should_exit = True
    server.thread.join(20)
    return ask(port, HEALTH)


Case = Callable[[RunningServer, int], str]
CASES: dict[str, Case] = {
    "a header that does not end": lambda _, port: ask(port, "GET / HTTP/1.1\r\n"),
    "a header of 40 kB": lambda _, port: ask(port, f"GET / HTTP/1.1\r\nX: {'x' * 40_000}\r\n\r\n"),
    "a body that does not end": lambda _, port: ask(port, f"{POST}{FORM}Content-Length: 9\r\n\r\n"),
    "more than 100 requests of one address": many_connections,
    "a client that reads nothing": unread_answers,
    "a client that disappears": lost_client,
    "a body over `--max-mb`": lambda _, port: ask(port, form(bytes(2_100_000))),
    "a full queue": full_queue,
    "a full disk": full_disk,
    "a page of another site": lambda _, port: ask(port, form(b"", "Origin: http://a.eu\r\n")),
    "a request without its key": lambda _, port: ask(port, form(b"").replace(b"one", b"two")),
    "an open session when the server stops": stop,
    "a server that has ended": ended,
}


def test_page_lists_every_case() -> None:
    assert TABLE.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["alone", pytest.param("nginx", marks=MARKS)])
def test_server_does_what_its_page_says(
    side: str,
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing hangs, no request stays in flight, and each has one line in the log."""
    monkeypatch.setattr("sbkit.serve.server.UNREAD_SECONDS", 1.0)
    options: dict[str, Any] = {"max_mb": 2.0, "keys": ["one"]}
    with running_server(tmp_path, tones=streaming_bundle(tmp_path), **options) as server:
        proxy = nginx(tmp_path, server.port) if side == "nginx" else nullcontext(server.port)
        with proxy as port:
            caplog.clear()
            assert CASES[case](server, port) == TABLE[case][side]
        wait_for(lambda: server.service.in_flight in (0, 1000) and not server.service.sessions)
        lines = [record for record in caplog.records if record.name == "sbkit.serve"]
        lines = [line for line in lines if line.levelname != "DEBUG"]
        assert len(lines) <= (3 if case.startswith("more than") else 1), caplog.text
        assert not any(line.exc_info for line in lines)
