"""What Prometheus reads at /metrics."""

import time
from collections.abc import Callable

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
SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)


class Metrics:
    """Counters and histograms of a server, and the memory and time of its process."""

    def __init__(self, *, sample_rate: int) -> None:
        """Make them all, at zero."""
        self._rate = sample_rate
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "sbkit_requests", "requests for transcripts", ["status"], registry=registry
        )
        self.latency = Histogram(
            "sbkit_request_seconds",
            "from the header of a request to the end of its answer",
            buckets=LATENCIES,
            registry=registry,
        )
        self.audio = Counter(
            "sbkit_audio_seconds", "of audio that was transcribed", registry=registry
        )
        self.batch_clips = Histogram(
            "sbkit_batch_clips", "clips of a batch", buckets=CLIPS, registry=registry
        )
        self.batch_seconds = Histogram(
            "sbkit_batch_seconds",
            "of padded audio in a batch",
            buckets=SECONDS,
            registry=registry,
        )

    def on_batch(self, clips: int, samples: int) -> None:
        """Count a batch and its audio, padding included."""
        self.batch_clips.observe(clips)
        self.batch_seconds.observe(samples_to_seconds(samples, self._rate))

    def show(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a figure that is read when it is asked for."""
        Gauge(name, help, registry=self.registry).set_function(read)

    def write(self) -> bytes:
        """Write all in the text format of Prometheus."""
        return generate_latest(self.registry)


class Observed:
    """Count the requests of a route by status, those whose clients have gone as 499."""

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
