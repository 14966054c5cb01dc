"""The layers around every request: errors, limits, keys, origins, metrics and the log."""

import json
import logging
import re
import time
from collections.abc import Callable, Container, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbkit.base.errors import SbkitError
from sbkit.base.messages import printable

logger = logging.getLogger("sbkit.serve")

KEY_SUBPROTOCOL = "openai-insecure-api-key."
PROBE_PATHS = ("/health", "/health/ready", "/metrics")  # polled all the time; logged as DEBUG
PUBLIC_PATHS = ("/", *PROBE_PATHS)  # these need no key
LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
CLIENT_GONE = 499  # only for metrics, as in nginx: no client reads it
ERROR_CODES = {401: "invalid_api_key", 404: "not_found"}
ERROR_HEADERS = {
    426: {"Upgrade": "websocket", "Connection": "Upgrade"},
    503: {"Retry-After": "1"},  # seconds
}
EVENT_STREAM = "text/event-stream; charset=utf-8"

Json = Any  # a value of JSON
JsonObject = dict[str, Json]

request_facts: ContextVar[JsonObject] = ContextVar("facts")  # model and audio_seconds, for the log


class ApiError(SbkitError):
    """An error that is sent to the client with its status; ``param`` is the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, *, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = ERROR_CODES.get(status) if code is None else code

    def plain(self) -> dict[str, dict[str, str | None]]:
        """Return the body, with the type and the code that the API has for the status."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        content = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": content}


def wrong_field(name: str, expected: str, actual: str) -> ApiError:
    """Return the error about a field with an invalid value."""
    return ApiError(400, f"`{name}` must be {expected}, but is {actual[:100]}.", name)


def too_large(limit: str, name: str = "file") -> ApiError:
    """Return the error about a file, or audio, that exceeds a limit of bytes or seconds."""
    return ApiError(413, f"`{name}` has more than {limit}, the limit. Send it in parts.", name)


def as_api_error(error: Exception) -> ApiError:
    """Convert an error for its client: unexpected errors are logged, and not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # of Starlette, such as for a broken form
        return ApiError(error.status_code, f"The API does not accept this request: {error.detail}")
    logger.error("A request failed.", exc_info=error)
    return ApiError(500, "Internal server error; see the server log.")


def event(name: str, **content: Json) -> str:
    """Write a server-sent event."""
    return f"data: {json.dumps({'type': name, **content}, ensure_ascii=False)}\n\n"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits on the size, the number and the duration of requests."""

    max_mb: float = 25.0  # of a body, in 10^6 bytes; OpenAI's limit
    max_seconds: float = 7200.0  # of audio
    max_turn_seconds: float = 300.0  # of a live turn that its client ends; it is cut there
    max_concurrent: int = 32  # requests processed at the same time
    max_queue: int = 128  # further requests that arrive or wait
    max_sessions: int = 64  # and connections of Home Assistant; audio is limited turn by turn
    max_session_seconds: float = 7200.0  # from the start of a session to its end
    answer_seconds: float = 600.0  # from the header of a request to the end of its answer

    @property
    def max_bytes(self) -> int:
        return round(self.max_mb * 1e6)

    def max_turn(self, sample_rate: int) -> float:
        """Return the seconds of a turn or a live clip, whose samples are kept with 16 bits."""
        return min(self.max_seconds, self.max_bytes / 2 / sample_rate)


class Metrics:
    """The figures of a server, and the memory and time of its process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter = partial(Counter, namespace="sbkit", registry=self.registry)
        self.requests = counter("requests", "by answer", ["path", "status"])
        self.latency = Histogram(
            "request_seconds",
            "to the end of the answer",
            namespace="sbkit",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.audio = counter("audio_seconds", "transcribed")
        self.speech = counter("speech_seconds", "synthesized")
        self.sessions = counter("sessions", "realtime sessions so far")

    def show(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when Prometheus asks."""
        gauge = Gauge(name, help, namespace="sbkit", registry=self.registry)
        gauge.set_function(read)


@dataclass(frozen=True)
class Observer:
    """Log every request, answer its error, and count the requests to ``paths`` by status.

    The log has no contents and no keys. An error after the start of an answer is sent as the last
    event of a stream; a file is cut off.
    """

    app: ASGIApp
    paths: Container[str]
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_facts.set({})
        # A proxy may name the server in the target, too (RFC 9112, 3.2.2).
        scope["path"] = re.sub("^https?://[^/]*/?", "/", scope["path"], flags=re.IGNORECASE)
        start = time.perf_counter()
        status = CLIENT_GONE
        is_answered = is_events = False

        async def observed_send(message: Message) -> None:
            nonlocal status, is_answered, is_events
            kind = message["type"].rpartition("http.response")[2]
            status = 101 if kind == "websocket.accept" else message.get("status", status)
            if kind == ".start":
                is_events = Headers(raw=message["headers"]).get("content-type") == EVENT_STREAM
            await send(message)
            is_answered = kind == ".body" and not message.get("more_body")

        scope["app"] = self  # so Starlette raises its errors, instead of answering in plain text
        try:
            await self.app(scope, receive, observed_send)
        except ClientDisconnect:
            pass
        except Exception as error:
            answer = as_api_error(error)
            if answer.status >= 500:
                request_facts.get()["error"] = str(answer)
            if status == CLIENT_GONE:  # nothing has been sent
                headers = ERROR_HEADERS.get(answer.status)
                response = JSONResponse(answer.plain(), answer.status, headers)
                await response(scope, receive, observed_send)
            elif is_events and not is_answered:
                body = event("error", **answer.plain()).encode()
                await send({"type": "http.response.body", "body": body})
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
        if "error" in facts:
            line += f": {facts['error']}"
        logger.log(logging.DEBUG if path in PROBE_PATHS else logging.INFO, "%s", line)


def admit(connection: HTTPConnection, keys: Sequence[str], origins: Sequence[str]) -> None:
    """Admit a request by its page and its key, or raise ApiError.

    A browser sends the origin of a page with each POST and WebSocket, even where CORS does not
    apply; other programs send none. The key is the bearer token, or a subprotocol of a WebSocket,
    because browsers let pages set no other header there.
    """
    headers = connection.headers
    host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
    if origin not in ("", f"http://{host}", f"https://{host}", *origins) and "*" not in origins:
        fix = f"Start the server with `--allow-origin {origin}` to allow it."
        raise ApiError(403, f"Pages of {origin} may not use this server. {fix}")
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        protocols = connection.scope.get("subprotocols", ())
        key = "".join(name for name in protocols if name.startswith(KEY_SUBPROTOCOL))
        key = key.removeprefix(KEY_SUBPROTOCOL)
    digest = sha256(key.strip().encode()).digest()
    # Compare all keys, each in a time that does not depend on the number of equal bytes.
    matches = [compare_digest(digest, sha256(valid.encode()).digest()) for valid in keys]
    if keys and not any(matches):
        raise ApiError(401, "The API key is missing or wrong (`Authorization: Bearer KEY`).")


def guard(app: ASGIApp, keys: Sequence[str], origins: Sequence[str]) -> ASGIApp:
    """Return an application that runs `admit` first; probes and the page need no key."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if {"content-length", "transfer-encoding"} <= {*Headers(scope=scope)}:
            error = ApiError(400, "A request has Content-Length or Transfer-Encoding, not both.")
            answer = JSONResponse(error.plain(), error.status, {"Connection": "close"})
            await answer(scope, receive, send)  # the body may hide another request (RFC 9112, 6.1)
            return
        is_public = scope["path"].removeprefix(scope["root_path"]) in PUBLIC_PATHS
        admit(HTTPConnection(scope), () if is_public else keys, origins)
        await app(scope, receive, send)

    return guarded
