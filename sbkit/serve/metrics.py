"""What Prometheus reads at /metrics."""

import time
from collections.abc import Callable, Container
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

from sbkit.serve.errors import CLIENT_GONE

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
    """Count the requests of some routes by status; those whose clients have gone as 499."""

    def __init__(self, app: ASGIApp, *, paths: Container[str], metrics: Metrics) -> None:
        self._app, self._paths, self._metrics = app, paths, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and count."""
        if (path := scope.get("path")) not in self._paths:
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), CLIENT_GONE

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            self._metrics.requests.labels(path, status).inc()
            self._metrics.latency.observe(time.perf_counter() - began)
