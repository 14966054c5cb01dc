"""What Prometheus reads at /metrics, and the log of requests."""

import logging
import time
from collections.abc import Callable, Container
from contextvars import ContextVar
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbkit.base.messages import printable
from sbkit.serve.errors import CLIENT_GONE
from sbkit.serve.limits import DRAINING, STOPPING, State

LOGGER = logging.getLogger("sbkit.serve")
noted: ContextVar[dict[str, Any]] = ContextVar("noted")  # of a request: model, audio_seconds
PROBES = ("/health/live", "/health/ready", "/metrics")  # asked all the time, and not logged
LATENCIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
CLIPS = (1, 2, 4, 8, 16, 32, 64)
SECONDS = (1, 2, 5, 10, 20, 30, 60)


class Metrics:
    """Counters and histograms of a server, and the memory and time of its process."""

    def __init__(self) -> None:
        """Make them all, at zero."""
        self._own: dict[str, Any] = {"namespace": "sbkit", "registry": CollectorRegistry()}
        ProcessCollector(registry=self._own["registry"])
        self.requests = Counter("requests", "by their answers", ["path", "status"], **self._own)
        self.latency = self._histogram("request_seconds", "to the end of the answer", LATENCIES)
        self.audio = Counter("audio_seconds", "transcribed", **self._own)
        self.speech = Counter("speech_seconds", "synthesized", **self._own)
        self.sessions = Counter("sessions", "realtime ones that were open", **self._own)
        self.streams = self._histogram("stream_batch", "sessions of a batch", CLIPS)
        self.clips = self._histogram("batch_clips", "clips of a batch", CLIPS)
        self.seconds = self._histogram("batch_seconds", "with padding", SECONDS)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, buckets=buckets, **self._own)

    def on_batch(self, clips: int, seconds: float) -> None:
        """Count a batch of clips, and its seconds with their padding."""
        self.clips.observe(clips)
        self.seconds.observe(seconds)

    def show(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a figure that is read when Prometheus asks."""
        Gauge(name, help, **self._own).set_function(read)

    def write(self) -> bytes:
        """Write all in the text format of Prometheus."""
        return generate_latest(self._own["registry"])


class Observed:
    """Count the requests of some routes by status, those whose clients have gone as 499; log all.

    The log has no contents and no keys. The connection outlives a fault that was answered; while
    the server drains, it ends with its answer.
    """

    def __init__(
        self, app: ASGIApp, *, paths: Container[str], metrics: Metrics, state: State
    ) -> None:
        self._app, self._paths, self._metrics, self._state = app, paths, metrics, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, count and log."""
        noted.set({})
        began, status, is_answered = time.perf_counter(), CLIENT_GONE, False

        async def note(message: Message) -> None:
            nonlocal status, is_answered
            kind = message["type"].rpartition("http.response")[2]
            status = 101 if kind == "websocket.accept" else message.get("status", status)
            if kind == ".start" and self._state.phase in (DRAINING, STOPPING):
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)
            is_answered = kind == ".body" and not message.get("more_body")

        try:
            await self._app(scope, receive, note)
        except Exception:
            if not is_answered:
                raise
            LOGGER.exception("A request failed.")
        finally:
            self._log(scope, status, time.perf_counter() - began)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        path, facts = scope["path"], noted.get()
        if path in self._paths:
            self._metrics.requests.labels(path, status).inc()
            self._metrics.latency.observe(seconds)
        line = f"{scope.get('method', 'GET')} {printable(path)} {status} {seconds:.3f} s"
        audio = facts.get("audio_seconds", 0.0)
        line += f", {audio:.1f} s of audio, model {facts['model']}" if "model" in facts else ""
        LOGGER.log(logging.DEBUG if path in PROBES else logging.INFO, "%s", line)
