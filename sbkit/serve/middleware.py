"""What surrounds every request: limits, keys, origins, metrics and the log."""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbkit.base.errors import ConfigError
from sbkit.base.files import read_text
from sbkit.base.messages import printable
from sbkit.serve.responses import CLIENT_GONE, ApiError, request_facts, too_large

logger = logging.getLogger("sbkit.serve")

MAX_KEY_FILE_BYTES = 1 << 20
KEY_SUBPROTOCOL = "openai-insecure-api-key."
WARMING, READY, DRAINING, STOPPING = "warming up", "ready", "draining", "stopping"
PROBE_PATHS = ("/health/live", "/health/ready", "/metrics")  # asked all the time, and not logged
LATENCIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
BATCH_SECONDS = (1, 2, 5, 10, 20, 30, 60)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large requests may be, how many there may be, and how long they may take.

    max_mb: of a body, in 10^6 bytes (OpenAI takes 25).
    max_seconds: of audio.
    max_concurrent: requests that are worked on at a time.
    max_queue: further requests that arrive or wait.
    max_sessions: realtime sessions; their audio is limited turn by turn.
    max_session_seconds: from the start of a session to its end.
    max_connections: of clients, whatever they do.
    receive_seconds: until a body has arrived.
    answer_seconds: until its answer is sent.
    drain_seconds: after SIGTERM, in which requests are still accepted.
    grace_seconds: then, to finish them.
    """

    max_mb: float = 25.0
    max_seconds: float = 7200.0
    max_concurrent: int = 32
    max_queue: int = 128
    max_sessions: int = 64
    max_session_seconds: float = 7200.0
    max_connections: int = 1000
    receive_seconds: float = 60.0
    answer_seconds: float = 600.0
    drain_seconds: float = 5.0
    grace_seconds: float = 30.0

    @property
    def max_bytes(self) -> int:
        """The largest body."""
        return round(self.max_mb * 1e6)


@dataclass
class State:
    """The phase of a server, and its requests.

    A server that drains accepts requests, but is not ready: load balancers send new ones elsewhere.

    in_flight: requests that arrive or are not done.
    sessions: open realtime sessions.
    stopping: set when sessions are to end.
    failure: of the warm-up.
    """

    phase: str = WARMING
    in_flight: int = 0
    sessions: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None

    def require_ready(self) -> None:
        """Raise ApiError in a phase in which no requests are accepted."""
        if self.phase not in (READY, DRAINING):
            raise ApiError(503, f"The server is {self.phase}. Try again later.")


class Metrics:
    """Counters and histograms of a server, and the memory and time of its process."""

    def __init__(self) -> None:
        self._options: dict[str, Any] = {"namespace": "sbkit", "registry": CollectorRegistry()}
        ProcessCollector(registry=self._options["registry"])
        self.requests = Counter("requests", "by answer", ["path", "status"], **self._options)
        self.latency = self._histogram("request_seconds", "to the end of the answer", LATENCIES)
        self.audio = Counter("audio_seconds", "transcribed", **self._options)
        self.speech = Counter("speech_seconds", "synthesized", **self._options)
        self.sessions = Counter("sessions", "realtime sessions so far", **self._options)
        self.streams = self._histogram("stream_batch", "sessions of a batch", BATCH_SIZES)
        self.clips = self._histogram("batch_clips", "clips of a batch", BATCH_SIZES)
        self.seconds = self._histogram("batch_seconds", "with padding", BATCH_SECONDS)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, buckets=buckets, **self._options)

    def on_batch(self, clips: int, seconds: float) -> None:
        """Count a batch of clips, and its seconds with their padding."""
        self.clips.observe(clips)
        self.seconds.observe(seconds)

    def show(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when Prometheus asks."""
        Gauge(name, help, **self._options).set_function(read)

    def write(self) -> bytes:
        """Write all in the text format of Prometheus."""
        return generate_latest(self._options["registry"])


class Observer:
    """Count the requests of some routes by status, with 499 for lost clients; log all requests.

    The log has no contents and no keys. A connection outlives a fault that was answered. While the
    server drains, a connection ends with its answer.
    """

    def __init__(
        self, app: ASGIApp, *, paths: Container[str], metrics: Metrics, state: State
    ) -> None:
        self._app, self._paths, self._metrics, self._state = app, paths, metrics, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_facts.set({})
        began, status, is_answered = time.perf_counter(), CLIENT_GONE, False

        async def send_and_note(message: Message) -> None:
            nonlocal status, is_answered
            kind = message["type"].rpartition("http.response")[2]
            status = 101 if kind == "websocket.accept" else message.get("status", status)
            if kind == ".start" and self._state.phase in (DRAINING, STOPPING):
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)
            is_answered = kind == ".body" and not message.get("more_body")

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            if not is_answered:
                raise
            logger.exception("A request failed.")
        finally:
            self._log(scope, status, time.perf_counter() - began)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        path, facts = scope["path"], request_facts.get()
        if path in self._paths:
            self._metrics.requests.labels(path, status).inc()
            self._metrics.latency.observe(seconds)
        line = f"{scope.get('method', 'GET')} {printable(path)} {status} {seconds:.3f} s"
        audio = facts.get("audio_seconds", 0.0)
        line += f", {audio:.1f} s of audio, model {facts['model']}" if "model" in facts else ""
        logger.log(logging.DEBUG if path in PROBE_PATHS else logging.INFO, "%s", line)


class Keys:
    """The API keys of a file, one on each line; without a file there are none."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.digests: list[bytes] = []
        self.read()

    def read(self) -> None:
        """Read the file, also again; raises ConfigError if it has no keys."""
        if self._file is None:
            return
        lines = read_text(self._file, max_bytes=MAX_KEY_FILE_BYTES, subject="`--api-key-file`")
        keys = [key for line in lines if (key := line.strip())]
        if not keys:  # the server would be open to all
            raise ConfigError(f"`--api-key-file {self._file}` has no keys. Write one on each line.")
        self.digests = [*map(_digest, keys)]


class KeyGuard:
    """Admit requests that carry a valid API key. If no keys are configured, admit all.

    The key is the bearer token, or a subprotocol of a WebSocket: browsers set no other header.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            protocols = scope.get("subprotocols", ())
            key = "".join(name for name in protocols if name.startswith(KEY_SUBPROTOCOL))
            key = key.removeprefix(KEY_SUBPROTOCOL)
        client_digest, digests = _digest(key.strip()), self._keys.digests
        # All are compared, each in a time that does not depend on what is equal.
        matches = [hmac.compare_digest(client_digest, digest) for digest in digests]
        if digests and not sum(matches):
            raise ApiError(
                401,
                "The API key is missing or not valid for this server. Send the header "
                "`Authorization: Bearer KEY`.",
            )
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


class OriginGuard:
    """Refuse requests from other sites' pages, and hosts that such a page may have chosen.

    A browser sends the origin of a page with each POST and WebSocket; other programs send none. By
    DNS rebinding a site's name leads here, and its pages have the same origin: names with a dot
    must be allowed, while addresses and local names belong to no site.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        """Take the origins that are allowed beside the server's own, ``*`` for all."""
        self._app, self._origins = app, [origin.lower() for origin in origins]
        self._names = {_name_of(origin.partition("://")[2]) for origin in self._origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if {"content-length", "transfer-encoding"} <= {*headers}:
            error = ApiError(
                400, "A request has Content-Length or Transfer-Encoding, but not both."
            )
            answer = JSONResponse(error.plain(), error.status, {"Connection": "close"})
            await answer(scope, receive, send)  # what follows may be smuggled (RFC 9112, 6.1)
            return
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        allowed = ["", f"http://{host}", f"https://{host}", *self._origins]
        fix = f"`--allow-origin {origin or f'http://{host}'}` of the server would allow it."
        if "*" not in allowed and origin not in allowed:
            raise ApiError(403, f"A page of {origin} may not use this server. {fix}")
        if "*" not in allowed and not self._is_allowed(_name_of(host)):
            raise ApiError(403, f"This server is not called {host}. {fix}")
        await self._app(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        if "." not in name or name.endswith(".localhost") or name in self._names:
            return True
        try:
            return bool(ip_address(name))
        except ValueError:
            return False


def _name_of(host: str) -> str:
    """Return a host without its port, an IPv6 address without its brackets."""
    return re.sub(r":\d+$", "", host).strip("[]")


class Admission:
    """Count the requests in flight, and refuse by its header a request that exceeds a limit."""

    def __init__(
        self, app: ASGIApp, *, media_type: str, max_bytes: int, limits: Limits, state: State
    ) -> None:
        """Admit requests of one media type, with bodies of at most ``max_bytes``."""
        self._app, self._media_type, self._max_bytes = app, media_type, max_bytes
        self._limits, self._state = limits, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, state = self._limits, self._state
        state.require_ready()
        self._check(Headers(scope=scope))
        state.in_flight += 1
        try:
            async with asyncio.timeout(limits.answer_seconds):
                await self._app(scope, receive, send)
        except TimeoutError:
            raise ApiError(
                503,
                f"The server did not answer within {limits.answer_seconds:g} s. Try again, or send "
                "less.",
            ) from None
        except asyncio.CancelledError:
            state.require_ready()  # if the grace time is over
            raise
        finally:
            state.in_flight -= 1

    def _check(self, headers: Headers) -> None:
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != self._media_type:
            raise ApiError(
                415, f"A request must be {self._media_type}, but is {media_type or 'of no type'}."
            )
        if int(headers.get("content-length", 0)) > self._max_bytes:
            raise too_large(f"{self._max_bytes / 1e6:g} MB", "body")
        max_in_flight = self._limits.max_concurrent + self._limits.max_queue
        if self._state.in_flight >= max_in_flight:
            raise ApiError(
                429, f"{max_in_flight} requests are in flight, the limit. Try again later."
            )
