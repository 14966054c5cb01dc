"""The application: routes of Starlette for transcripts, speech, models, health and metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from io import IOBase
from typing import Any, TypeVar, cast

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from sbkit.base.messages import did_you_mean
from sbkit.base.units import samples_to_seconds
from sbkit.base.versions import __version__
from sbkit.serve.api import (
    FILE_FIELD,
    MAX_SPEECH_BYTES,
    NOTES_HEADER,
    ServedModels,
    SpeechFields,
    TranscriptionFields,
    is_among,
    parse_fields,
    parse_object,
    speech_response,
    transcription_response,
    unknown_model,
)
from sbkit.serve.middleware import (
    HANDLERS,
    READY,
    Admission,
    ApiError,
    ApiKeys,
    JsonObject,
    KeyGuard,
    Limits,
    Metrics,
    Observer,
    OriginGuard,
    State,
    too_large,
    wrong_field,
)
from sbkit.serve.realtime import RealtimeSession
from sbkit.serve.recognition import RecognitionService
from sbkit.serve.tts import Voice

TRANSCRIPTIONS, SPEECH = "/v1/audio/transcriptions", "/v1/audio/speech"
PATHS = (TRANSCRIPTIONS, SPEECH, "/v1/realtime", "/v1/audio/voices", "/v1/models", "/health/ready")
FORM_LIMITS = {"max_files": 1, "max_fields": 100, "max_part_size": 1 << 20}  # bytes of a field
LONG_PART = "Part exceeded maximum size"  # Starlette 1.7 to 1.10 does not name the field
CORS: Any = {"allow_methods": ("GET", "POST"), "allow_headers": "*", "allow_private_network": True}
CORS["expose_headers"] = (NOTES_HEADER,)
PAGE_POLICY = (  # the page is one file, and sends requests only to this server
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' blob:; "
    "connect-src 'self'; media-src blob:; img-src data:; frame-ancestors 'none'"
)
Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Service:
    """The models behind the routes, and their limits."""

    models: ServedModels
    limits: Limits
    declared: dict[str, str]  # the requested device, runtime and precision
    state: State
    metrics: Metrics
    note: str | None = None  # why `auto` takes no GPU
    origins: Sequence[str] = ()  # of pages that may use the server; see `OriginGuard`

    def app(self, keys: ApiKeys) -> ASGIApp:
        """Make the application, for clients with one of the keys."""
        state = self.state
        engines = [model.engine for model in self.models.models]
        batchers = [engine.batcher for engine in engines if isinstance(engine, RecognitionService)]
        self.metrics.show("requests_in_flight", "arriving or not done", lambda: state.in_flight)
        self.metrics.show("sessions_open", "realtime sessions", lambda: state.sessions)
        self.metrics.show("queued_segments", "waiting for a model", lambda: sum(map(len, batchers)))
        max_bytes = self.limits.max_bytes
        api = [
            self._post(TRANSCRIPTIONS, self._transcriptions, "multipart/form-data", max_bytes),
            self._post(SPEECH, self._speech, "application/json", MAX_SPEECH_BYTES),
            WebSocketRoute("/realtime", self._realtime),
            Route("/realtime", self._no_upgrade),
            Route("/audio/voices", self._voices),
            Route("/models", self._models),
            Route("/models/{name:path}", self._one_model),
        ]
        strictly: Any = {"redirect_slashes": False, "default": _no_path}
        key_guard = [Middleware(KeyGuard, keys=keys)]
        routes = [
            Mount("/v1", Router(api, **strictly), middleware=key_guard),
            Route("/", self._page),
            Route("/card", self._card, middleware=key_guard),
            Route("/health/live", self._live),
            Route("/health/ready", self._ready),
            Route("/metrics", self._metrics),
        ]
        origin_guard = [Middleware(OriginGuard, origins=self.origins, keys=keys)]
        cors = Middleware(CORSMiddleware, allow_origins=self.origins, **CORS)
        app = Starlette(
            routes=[Mount("", Router(routes, **strictly), middleware=origin_guard)],
            middleware=[cors] if self.origins else [],
            exception_handlers=HANDLERS,
        )
        return Observer(app, paths=(TRANSCRIPTIONS, SPEECH), metrics=self.metrics, state=state)

    def _post(self, path: str, handler: Handler, media_type: str, max_bytes: int) -> Route:
        limits: Any = {"media_type": media_type, "max_bytes": max_bytes, "limits": self.limits}
        admission = [Middleware(Admission, state=self.state, **limits)]
        path = path.removeprefix("/v1")
        return Route(path, handler, methods=["POST"], middleware=admission, max_body_size=max_bytes)

    async def _transcriptions(self, request: Request) -> Response:
        form: FormData = await self._receive(request.form(**FORM_LIMITS), self.limits.max_bytes)
        try:
            fields = TranscriptionFields.parse(form)
            recognizer = self.models.pick_recognizer(fields)
        except ApiError:
            await form.close()
            raise
        file = cast(UploadFile, form["file"]).file
        response = transcription_response(fields, cast(IOBase, file), recognizer)
        return await _until_disconnected(request, response)

    async def _speech(self, request: Request) -> Response:
        content = await self._receive(request.body(), MAX_SPEECH_BYTES)
        fields = parse_fields(SpeechFields, parse_object(content))
        voice = self.models.pick_voice(fields.model, fields.voice)
        return await _until_disconnected(request, speech_response(fields, voice))

    async def _receive(self, body: Awaitable[Result], max_bytes: int) -> Result:
        try:
            async with asyncio.timeout(self.limits.receive_seconds):
                return await body
        except TimeoutError:
            seconds = self.limits.receive_seconds
            raise ApiError(408, f"The request did not arrive within {seconds:g} s.") from None
        except HTTPException as error:
            if error.status_code == 413:
                raise too_large(f"{max_bytes / 1e6:g} MB", "body") from None
            if error.detail.startswith(LONG_PART):
                raise wrong_field("file", FILE_FIELD, "a field of over 1 MB") from None
            raise

    async def _realtime(self, socket: WebSocket) -> None:
        self.state.require_ready()
        self.models.pick(RecognitionService, socket.query_params.get("model", ""))
        if self.state.sessions >= (limit := self.limits.max_sessions):
            raise ApiError(429, f"{limit} sessions are open, the limit. Try again later.")
        session = RealtimeSession(
            socket, models=self.models, limits=self.limits, state=self.state, metrics=self.metrics
        )
        self.state.sessions += 1
        self.metrics.sessions.inc()
        try:
            await session.run()
        finally:
            self.state.sessions -= 1

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
            card["effective"] = asdict(engine.effective)
            if isinstance(engine, RecognitionService):
                chunks = engine.streaming and engine.streaming.chunks
                card["language"], card["finds_turns"] = engine.language, engine.silence is not None
                card["chunk_seconds"] = chunks and samples_to_seconds(chunks.step, rate)
                cards["recognizers"].append(card)
            else:
                cards["voices"].append(card)
        return JSONResponse({"status": self.state.phase, **cards})

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        models = []
        for model in self.models.models:
            effective = asdict(model.engine.effective)
            models.append({"name": model.name, "declared": self.declared, "effective": effective})
        phase, note = self.state.phase, self.note
        body = {"status": phase, "sbkit": __version__, "note": note, "models": models}
        return JSONResponse(body, 200 if self.state.phase == READY else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.write(), media_type=CONTENT_TYPE_LATEST)


async def _until_disconnected(request: Request, result: Awaitable[Result]) -> Result:
    """Wait for a result as long as the client does; raises ClientDisconnect."""

    async def wait_for_disconnection() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work = asyncio.ensure_future(result)
    disconnection = asyncio.ensure_future(wait_for_disconnection())
    try:
        await asyncio.wait((work, disconnection), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        disconnection.cancel()
        work.cancel()
        await asyncio.wait((work,))


async def _no_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Raise ApiError, with the path that was probably meant."""
    path = scope["path"].rstrip("/").lower()
    if path.rpartition("/")[2].startswith(("health", "ready", "live", "ping", "status")):
        path = "/health/ready"
    hint = did_you_mean(path, PATHS)
    raise ApiError(404, f"This server has no path {scope['path'][:100]}.{hint}")
