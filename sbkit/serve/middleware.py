"""The layers around every request: errors, limits, keys, origins, metrics and the log."""

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from sbkit.base.errors import ConfigError, SbkitError
from sbkit.base.files import read_text_lines
from sbkit.base.messages import printable

logger = logging.getLogger("sbkit.serve")

KEY_SUBPROTOCOL = "openai-insecure-api-key."
WARMING, READY, DRAINING, STOPPING = "warming up", "ready", "draining", "stopping"
PROBE_PATHS = ("/health/live", "/health/ready", "/metrics")  # polled all the time, so not logged
LATENCIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
CLIENT_GONE = 499  # only for metrics, as in nginx: no client reads it
ERROR_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
ERROR_HEADERS = {status: {"Retry-After": "1"} for status in (429, 503)}  # seconds
ERROR_HEADERS[426] = {"Upgrade": "websocket", "Connection": "Upgrade"}
EVENT_STREAM = "text/event-stream; charset=utf-8"

Json = Any  # a value of JSON
JsonObject = dict[str, Json]

request_facts: ContextVar[JsonObject] = ContextVar("facts")  # model and audio_seconds, for the log


class ApiError(SbkitError):
    """An error that a client gets with its status; ``param`` is the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, *, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = ERROR_CODES.get(status) if code is None else code

    def plain(self) -> dict[str, dict[str, str | None]]:
        """Return the body; the API fixes the type and the code of each status."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        content = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": content}


def wrong_field(name: str, expected: str, actual: str) -> ApiError:
    """Return the error about a field with an invalid value."""
    return ApiError(400, f"`{name}` must be {expected}, but is {actual[:100]}.", name)


def too_large(limit: str, name: str = "file") -> ApiError:
    """Return the error about a file, or audio, that exceeds a limit of bytes or seconds."""
    return ApiError(413, f"`{name}` has more than {limit}, the limit. Send it in parts.", name)


def as_api_error(error: Exception) -> ApiError:
    """Convert Starlette's errors (404, a broken form), and all unexpected ones to status 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"The API does not accept this request: {error.detail}")
    return ApiError(500, "Internal server error; see the server log.")


def event(name: str, **content: Json) -> str:
    """Write a server-sent event."""
    return f"data: {json.dumps({'type': name, **content}, ensure_ascii=False)}\n\n"


def as_logged_error(error: Exception) -> ApiError:
    """Convert an error that is sent inside an answer; the log gets what the client must not see."""
    if not isinstance(error, ApiError):
        logger.error("A request failed.", exc_info=error)
    return as_api_error(error)


def _handle(_: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    answer = as_api_error(error)
    return JSONResponse(answer.plain(), answer.status, headers=ERROR_HEADERS.get(answer.status))


HANDLERS: Mapping[type[Exception], ExceptionHandler] = dict.fromkeys(
    (ApiError, HTTPException, ClientDisconnect, Exception), _handle
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits on the size, the number and the duration of requests."""

    max_mb: float = 25.0  # of a body, in 10^6 bytes; OpenAI's limit
    max_seconds: float = 7200.0  # of audio
    max_turn_seconds: float = 300.0  # of a live turn that its client ends; it is cut there
    max_concurrent: int = 32  # requests processed at the same time
    max_queue: int = 128  # further requests that arrive or wait
    max_sessions: int = 64  # realtime sessions; their audio is limited turn by turn
    max_session_seconds: float = 7200.0  # from the start of a session to its end
    max_connections: int = 1000  # of clients, used or not
    receive_seconds: float = 60.0  # until a body has arrived
    answer_seconds: float = 600.0  # until the answer is sent
    drain_seconds: float = 5.0  # after SIGTERM, while requests are still accepted
    grace_seconds: float = 30.0  # after that, to finish them

    @property
    def max_bytes(self) -> int:
        return round(self.max_mb * 1e6)


@dataclass
class State:
    """The phase of a server, and its requests.

    A draining server still accepts requests, but reports that it is not ready, so that load
    balancers send new ones elsewhere.
    """

    phase: str = WARMING
    in_flight: int = 0  # requests that arrive, wait or are processed
    sessions: int = 0  # open realtime sessions
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # set when sessions must end
    failure: BaseException | None = None  # of the warm-up

    def require_ready(self) -> None:
        """Raise ApiError unless requests are accepted."""
        if self.phase not in (READY, DRAINING):
            raise ApiError(503, f"The server is {self.phase}. Try again later.")


class Metrics:
    """Counters and histograms of a server, and the memory and time of its process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        counter = partial(Counter, namespace="sbkit", registry=self._registry)
        histogram = partial(Histogram, namespace="sbkit", registry=self._registry)
        self.requests = counter("requests", "by answer", ["path", "status"])
        self.latency = histogram("request_seconds", "to the end of the answer", buckets=LATENCIES)
        self.audio = counter("audio_seconds", "transcribed")
        self.speech = counter("speech_seconds", "synthesized")
        self.sessions = counter("sessions", "realtime sessions so far")
        self.streams = histogram("stream_batch", "sessions of a batch", buckets=BATCH_SIZES)
        self.clips = histogram("batch_clips", "clips of a batch", buckets=BATCH_SIZES)

    def show(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when Prometheus asks."""
        gauge = Gauge(name, help, namespace="sbkit", registry=self._registry)
        gauge.set_function(read)

    def write(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


@dataclass(frozen=True)
class Observer:
    """Log every request, and count the requests to ``paths`` by status; 499 is a lost client.

    The log has no contents and no keys. Starlette answers an unexpected error and raises it again;
    it is logged here. If an answer has begun, its events end with the error; a file is cut off.
    While the server drains, each answer closes its connection.
    """

    app: ASGIApp
    paths: Container[str]
    metrics: Metrics
    state: State

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_facts.set({})
        start = time.perf_counter()
        status = CLIENT_GONE
        is_answered = is_events = False

        async def observed_send(message: Message) -> None:
            nonlocal status, is_answered, is_events
            kind = message["type"].rpartition("http.response")[2]
            status = 101 if kind == "websocket.accept" else message.get("status", status)
            if kind == ".start" and self.state.phase in (DRAINING, STOPPING):
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            if kind == ".start":
                is_events = Headers(raw=message["headers"]).get("content-type") == EVENT_STREAM
            await send(message)
            is_answered = kind == ".body" and not message.get("more_body")

        try:
            await self.app(scope, receive, observed_send)
        except Exception as error:
            # Once an answer has begun, Starlette raises another error in place of an ApiError.
            cause = error.__cause__ if isinstance(error.__cause__, ApiError) else error
            if is_events and not is_answered:
                body = event("error", **as_logged_error(cause).plain())
                await send({"type": "http.response.body", "body": body.encode()})
            elif isinstance(cause, ApiError):
                logger.error("A file is cut off: %s", cause)
            else:
                logger.exception("A request failed.")
        finally:
            self._log(scope, status, time.perf_counter() - start)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        facts = request_facts.get()
        if path in self.paths:
            self.metrics.requests.labels(path, status).inc()
            self.metrics.latency.observe(seconds)
        line = f"{scope.get('method', 'GET')} {printable(path)} {status} {seconds:.3f} s"
        if "model" in facts:
            audio_seconds = facts.get("audio_seconds", 0.0)
            line += f", {audio_seconds:.1f} s of audio, model {facts['model']}"
        logger.log(logging.DEBUG if path in PROBE_PATHS else logging.INFO, "%s", line)


class ApiKeys:
    """The API keys of a file with one key per line, or a comment after #; none without a file."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.digests: list[bytes] = []
        self.read()

    def read(self) -> None:
        """Read the file, also a second time; raises ConfigError for no keys or unusable ones."""
        if self._file is None:
            return
        lines = read_text_lines(self._file, subject="`--api-key-file`")
        keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not keys:  # the server would be open to everyone
            raise ConfigError(f"`--api-key-file {self._file}` has no keys. Write one per line.")
        if not all(key.isascii() and key.isprintable() for key in keys):
            raise ConfigError(f"A key of `--api-key-file {self._file}` is not printable ASCII.")
        self.digests = [*map(_digest, keys)]


@dataclass(frozen=True)
class KeyGuard:
    """Admit requests that carry a valid API key. If no keys are configured, admit all.

    The key is the bearer token, or a subprotocol of a WebSocket: browsers let pages set no other
    header there.
    """

    app: ASGIApp
    keys: ApiKeys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            protocols = scope.get("subprotocols", ())
            key = "".join(name for name in protocols if name.startswith(KEY_SUBPROTOCOL))
            key = key.removeprefix(KEY_SUBPROTOCOL)
        client_digest = _digest(key.strip())
        digests = self.keys.digests
        # Compare all keys, each in a time that does not depend on the number of equal bytes.
        matches = [hmac.compare_digest(client_digest, digest) for digest in digests]
        if digests and not sum(matches):
            raise ApiError(401, "The API key is missing or wrong (`Authorization: Bearer KEY`).")
        await self.app(scope, receive, send)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


class OriginGuard:
    """Refuse requests from pages of other sites, and requests to host names of other sites.

    A browser sends the origin of a page with each POST and WebSocket; other programs send none. By
    DNS rebinding, a site can let its own name lead here, so that its pages have the server's
    origin. So a host name with a dot must be allowed; addresses and local names belong to no site.
    If the server has keys, any host name will do, since no page of another site has a key.

    origins: allowed besides the server's own; ``*`` allows all.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str], keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys
        self._origins = [origin.lower() for origin in origins]
        self._host_names = {_host_name(origin.partition("://")[2]) for origin in self._origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if {"content-length", "transfer-encoding"} <= {*headers}:
            error = ApiError(400, "A request has Content-Length or Transfer-Encoding, not both.")
            answer = JSONResponse(error.plain(), error.status, {"Connection": "close"})
            await answer(scope, receive, send)  # the body may hide another request (RFC 9112, 6.1)
            return
        host = headers.get("host", "").lower()
        origin = headers.get("origin", "").lower()
        if "*" not in self._origins:
            fix = f"`--allow-origin {origin or f'http://{host}'}` of the server would allow it."
            if origin not in ("", f"http://{host}", f"https://{host}", *self._origins):
                raise ApiError(403, f"A page of {origin} may not use this server. {fix}")
            if not (self._keys.digests or self._is_allowed(_host_name(host))):
                raise ApiError(403, f"This server is not called {host}. {fix}")
        await self._app(scope, receive, send)

    def _is_allowed(self, host_name: str) -> bool:
        if "." not in host_name or host_name.endswith(".localhost"):
            return True
        try:
            return host_name in self._host_names or bool(ip_address(host_name))
        except ValueError:
            return False


def _host_name(host: str) -> str:
    """Return a host without its port, and an IPv6 address without its brackets."""
    return re.sub(r":\d+$", "", host).strip("[]")


@dataclass(frozen=True)
class Admission:
    """Count the requests in flight, and refuse requests whose headers exceed a limit."""

    app: ASGIApp
    media_type: str  # of bodies
    max_bytes: int  # of a body
    limits: Limits
    state: State

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits, state, headers = self.limits, self.state, Headers(scope=scope)
        state.require_ready()
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != self.media_type:
            actual = media_type or "of no type"
            raise ApiError(415, f"A request must be {self.media_type}, but is {actual}.")
        if int(headers.get("content-length", 0)) > self.max_bytes:
            raise too_large(f"{self.max_bytes / 1e6:g} MB", "body")
        max_in_flight = limits.max_concurrent + limits.max_queue
        if state.in_flight >= max_in_flight:
            message = f"{max_in_flight} requests are in flight, the limit. Try again later."
            raise ApiError(429, message)
        state.in_flight += 1
        try:
            async with asyncio.timeout(limits.answer_seconds):
                await self.app(scope, receive, send)
        except TimeoutError:
            message = f"The server did not answer within {limits.answer_seconds:g} s."
            raise ApiError(503, message) from None
        except asyncio.CancelledError:
            state.require_ready()  # raises ApiError if the grace time is over
            raise
        finally:
            state.in_flight -= 1
