"""The application: routes of Starlette for transcripts, speech, models, health and metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from sbkit.base.messages import did_you_mean, note_once, printable
from sbkit.base.units import samples_to_seconds
from sbkit.base.versions import __version__
from sbkit.serve.api import (
    MAX_SPEECH_BYTES,
    NOTES_HEADER,
    ServedModels,
    TranscriptionOptions,
    answer_speech,
    answer_transcription,
    is_among,
    query_notes,
    unknown_model,
)
from sbkit.serve.middleware import (
    ApiError,
    JsonObject,
    Limits,
    Metrics,
    Observer,
    guard,
    too_large,
)
from sbkit.serve.realtime import RealtimeSession
from sbkit.serve.recognition import RecognitionService
from sbkit.serve.tts import Voice

TRANSCRIPTION_ROUTE, SPEECH_ROUTE = "/v1/audio/transcriptions", "/v1/audio/speech"
PATHS = (
    TRANSCRIPTION_ROUTE,
    SPEECH_ROUTE,
    "/v1/realtime",
    "/v1/audio/voices",
    "/v1/models",
    "/health/ready",
)
LOCAL_HOSTS = ("localhost", "*.localhost", "127.0.0.1", "[::1]")
PAGE_POLICY = (  # the page is one file, and sends requests only to this server
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' blob:; "
    "connect-src 'self'; media-src blob:; img-src data:; frame-ancestors 'none'"
)


@dataclass(kw_only=True)
class Service:
    """The models behind the routes, their clients and limits.

    hosts: the names by which requests may address the server, besides the hosts of ``origins``;
        ``*`` allows any name, also one that another site points here by DNS rebinding.
    origins: the origins of further pages that may use the server; ``*`` allows all.
    """

    models: ServedModels
    limits: Limits
    declared: dict[str, str]  # the requested device, runtime and precision
    metrics: Metrics
    note: str | None = None  # why `auto` takes no GPU
    keys: Sequence[str] = ()  # if there are none, everyone is admitted
    hosts: Sequence[str] = LOCAL_HOSTS
    origins: Sequence[str] = ()
    is_ready: bool = False
    in_flight: int = 0  # requests that are arriving, waiting or being processed
    sessions: int = 0  # open realtime sessions

    def warm_up(self) -> None:
        """Make the models ready; until then, requests are refused."""
        for model in self.models.models:
            model.engine.warm_up()
        self.is_ready = True

    def app(self) -> ASGIApp:
        """Make the application."""
        engines = [model.engine for model in self.models.models]
        queues = [engine.segments for engine in engines if isinstance(engine, RecognitionService)]
        self.metrics.show("requests_in_flight", "arriving or not done", lambda: self.in_flight)
        self.metrics.show("sessions_open", "realtime sessions", lambda: self.sessions)
        self.metrics.show("queued_segments", "waiting for a model", lambda: sum(map(len, queues)))
        routes = [
            self._post(TRANSCRIPTION_ROUTE, answer_transcription, self.limits.max_bytes),
            self._post(SPEECH_ROUTE, answer_speech, MAX_SPEECH_BYTES),
            WebSocketRoute("/v1/realtime", self._realtime),
            Route("/v1/realtime", self._no_upgrade),
            Route("/v1/audio/voices", self._voices),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/", self._page),
            Route("/card", self._card),
            Route("/health", self._live),
            Route("/health/ready", self._ready),
            Route("/metrics", self._metrics),
        ]
        hosts = [*self.hosts, *(urlsplit(origin).hostname or origin for origin in self.origins)]
        hosts += ["*"] if self.keys else []  # no page of another site has a key
        app: ASGIApp = Router(routes, redirect_slashes=False, default=_no_path)
        app = guard(app, self.keys, self.origins)
        app = TrustedHostMiddleware(app, allowed_hosts=hosts, www_redirect=False)
        app = Observer(app, paths=(TRANSCRIPTION_ROUTE, SPEECH_ROUTE), metrics=self.metrics)
        return CORSMiddleware(
            app,
            allow_origins=self.origins,
            allow_methods=("GET", "POST"),
            allow_headers="*",
            allow_private_network=True,
            expose_headers=[NOTES_HEADER],
        )

    def _post(self, path: str, answer: Callable[..., Awaitable[Response]], max_bytes: int) -> Route:
        admission = Middleware(Admission, service=self, max_bytes=max_bytes)
        return Route(path, partial(answer, self.models), methods=["POST"], middleware=[admission])

    def require_ready(self) -> None:
        """Raise ApiError unless the models are warm."""
        if not self.is_ready:
            raise ApiError(503, "The server is warming up. Try again later.")

    @contextmanager
    def open_session(self) -> Iterator[None]:
        """Count a session; raises ApiError if there are too many."""
        self.require_ready()
        if self.sessions >= (limit := self.limits.max_sessions):
            raise ApiError(503, f"{limit} sessions are open, the limit. Try again later.")
        self.sessions += 1
        self.metrics.sessions.inc()
        try:
            yield
        finally:
            self.sessions -= 1

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request in flight; raises ApiError if there are too many."""
        self.require_ready()
        limit = self.limits.max_concurrent + self.limits.max_queue
        if self.in_flight >= limit:
            raise ApiError(503, f"{limit} requests are in flight, the limit. Try again later.")
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def _realtime(self, socket: WebSocket) -> None:
        for note in query_notes(socket, TranscriptionOptions, used=("model", "intent")):
            note_once(printable(note[:100]), key="query of a session")
        self.models.pick(RecognitionService, socket.query_params.get("model", ""))
        session = RealtimeSession(
            socket, models=self.models, limits=self.limits, metrics=self.metrics
        )
        with self.open_session():
            await session.run()

    async def _no_upgrade(self, request: Request) -> Response:
        raise ApiError(426, "This WebSocket needs the header `Upgrade: websocket`, with HTTP/1.1.")

    async def _voices(self, request: Request) -> Response:
        voices = [
            {"id": name, "name": name, "language": voice.language}
            for name, voice in self.models.engines(Voice).items()
        ]
        return JSONResponse({"voices": voices})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self._model, self.models.names)]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not is_among(name, self.models.names):
            raise unknown_model(name, self.models.names)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> JsonObject:
        created = next((model.created for model in self.models.models if model.name == name), 0)
        return {"id": name, "object": "model", "created": created, "owned_by": "sbkit"}

    async def _page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache"}
        content = files("sbkit.serve").joinpath("page.html").read_bytes()
        return HTMLResponse(content, headers=headers)

    async def _card(self, request: Request) -> Response:
        """Describe all recognizers and voices for the page."""
        cards: dict[str, list[JsonObject]] = {"recognizers": [], "voices": []}
        for model in self.models.models:
            engine = model.engine
            rate = engine.sample_rate
            card: JsonObject = {"name": model.name, "readme": model.readme, "sample_rate": rate}
            card["effective"] = asdict(engine.runs_on)
            if isinstance(engine, RecognitionService):
                chunks = engine.streaming and engine.streaming.chunks
                card["language"], card["finds_turns"] = engine.language, engine.silence is not None
                card["chunk_seconds"] = chunks and samples_to_seconds(chunks.step, rate)
                cards["recognizers"].append(card)
            else:
                cards["voices"].append(card)
        return JSONResponse({"status": self._status, **cards})

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        models = []
        for model in self.models.models:
            effective = asdict(model.engine.runs_on)
            models.append({"name": model.name, "declared": self.declared, "effective": effective})
        facts = {"status": self._status, "sbkit": __version__, "note": self.note}
        return JSONResponse({**facts, "models": models}, 200 if self.is_ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @property
    def _status(self) -> str:
        return "ready" if self.is_ready else "warming up"


@dataclass(frozen=True)
class Admission:
    """Limit the number of requests in flight, and the bytes and the time of each."""

    app: ASGIApp
    service: Service
    max_bytes: int  # of a body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, limits = self.service, self.service.limits
        declared_bytes = int(Headers(scope=scope).get("content-length", 0))
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if max(num_bytes, declared_bytes) > self.max_bytes:
                raise too_large(f"{self.max_bytes / 1e6:g} MB", "body")
            return message

        try:
            with service.open_request():
                async with asyncio.timeout(limits.answer_seconds):
                    await self.app(scope, receive_limited, send)
        except TimeoutError:
            message = f"The server did not answer within {limits.answer_seconds:g} s."
            raise ApiError(503, message) from None
        except asyncio.CancelledError:
            raise ApiError(503, "The server stops. Try again later.") from None


async def _no_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Raise ApiError, and suggest the closest path."""
    hint = did_you_mean(scope["path"].rstrip("/").lower(), PATHS)
    raise ApiError(404, f"This server has no path {scope['path'][:100]}.{hint}")
