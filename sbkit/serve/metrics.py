"""What Prometheus reads at /metrics."""

import time
from collections.abc import Callable
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

from sbkit.base.units import samples_to_seconds
from sbkit.serve.errors import CLIENT_GONE

LATENCIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
CLIPS = (1, 2, 4, 8, 16, 32, 64)
SECONDS = (1, 2, 5, 10, 20, 30, 60)


class Metrics:
    """Counters and histograms of a server, and the memory and time of its process."""

    def __init__(self, *, sample_rate: int) -> None:
        """Make them all, at zero."""
        self._rate, self._registry = sample_rate, CollectorRegistry()
        ProcessCollector(registry=self._registry)
        own: dict[str, Any] = {"namespace": "sbkit", "registry": self._registry}
        self.requests = Counter("requests", "for transcripts", ["status"], **own)
        self.latency = Histogram(
            "request_seconds", "from header to end of answer", buckets=LATENCIES, **own
        )
        self.audio = Counter("audio_seconds", "transcribed", **own)
        self.sessions = Counter("sessions", "realtime ones that were open", **own)
        self.streams = Histogram("stream_batch", "sessions of a batch", buckets=CLIPS, **own)
        self.clips = Histogram("batch_clips", "clips of a batch", buckets=CLIPS, **own)
        self.seconds = Histogram("batch_seconds", "with padding", buckets=SECONDS, **own)

    def on_batch(self, clips: int, samples: int) -> None:
        """Count a batch of clips of so many samples each, with their padding."""
        self.clips.observe(clips)
        self.seconds.observe(clips * samples_to_seconds(samples, self._rate))

    def show(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a figure that is read when Prometheus asks."""
        Gauge(name, help, namespace="sbkit", registry=self._registry).set_function(read)

    def write(self) -> bytes:
        """Write all in the text format of Prometheus."""
        return generate_latest(self._registry)


class Observed:
    """Count the requests of a route by status; those whose clients have gone as 499."""

    def __init__(self, app: ASGIApp, *, path: str, metrics: Metrics) -> None:
        self._app, self._path, self._metrics = app, path, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and count."""
        if scope.get("path") != self._path:
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
            self._metrics.requests.labels(status).inc()
            self._metrics.latency.observe(time.perf_counter() - began)
