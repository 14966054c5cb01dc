"""The application: transcripts, speech, models, health and metrics, as routes of Starlette."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from sbkit.base.errors import SbkitError
from sbkit.base.units import samples_to_seconds
from sbkit.base.versions import __version__
from sbkit.runtime.transcriber import Transcript
from sbkit.serve.answers import EVENTS, answer, event
from sbkit.serve.errors import HANDLERS, ApiError, as_api_error, too_large
from sbkit.serve.fields import STREAMED, Fields
from sbkit.serve.limits import READY, Admission, KeyGuard, Keys, Limits, OriginGuard, State
from sbkit.serve.metrics import Metrics, Observed, noted
from sbkit.serve.models import Model, Models, unknown_model
from sbkit.serve.realtime import RealtimeSession
from sbkit.serve.recognizer import Recognizer
from sbkit.serve.speech import LARGEST, SpeechFields, speech_response

FORM_TYPE = "multipart/form-data"
TRANSCRIPTIONS, SPEECH = "/v1/audio/transcriptions", "/v1/audio/speech"
FORM = {"max_files": 1, "max_fields": 100, "max_part_size": 1 << 16}  # bytes of a field
CORS: Any = {"allow_methods": ("GET", "POST"), "allow_headers": "*", "allow_private_network": True}
PAGE_POLICY = (  # it is one file, and asks this server alone
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' blob:; "
    "connect-src 'self'; media-src blob:; img-src data:; frame-ancestors 'none'"
)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the routes answer from; declared: what was asked for of device, runtime, precision."""

    models: Models
    limits: Limits
    declared: dict[str, str]
    state: State
    metrics: Metrics
    origins: Sequence[str] = ()

    def app(self, keys: Keys) -> ASGIApp:
        """Make the application; keys: that clients may have; for its origins see `OriginGuard`."""
        state, models = self.state, self.models.models
        queues = [each.engine.batcher for each in models if isinstance(each.engine, Recognizer)]
        self.metrics.show("requests_in_flight", "arriving or not done", lambda: state.in_flight)
        self.metrics.show("sessions_open", "realtime ones", lambda: state.sessions)
        self.metrics.show("queued_pieces", "waiting for a model", lambda: sum(map(len, queues)))
        own = [
            self._post(TRANSCRIPTIONS, self._transcriptions, FORM_TYPE, self.limits.max_bytes),
            self._post(SPEECH, self._speech, "application/json", LARGEST),
            WebSocketRoute("/realtime", self._realtime),
            Route("/realtime", self._no_upgrade),
            Route("/models", self._models),
            Route("/models/{name:path}", self._one_model),
            WebSocketRoute("/{path:path}", _no_socket),
        ]
        guard = [Middleware(KeyGuard, keys=keys)]
        routes = [
            Mount("/v1", routes=own, middleware=guard),
            Route("/", self._page),
            Route("/card", self._card, middleware=guard),
            Route("/health/live", self._live),
            Route("/health/ready", self._ready),
            Route("/metrics", self._metrics),
            WebSocketRoute("/{path:path}", _no_socket),
        ]
        cors = Middleware(CORSMiddleware, allow_origins=self.origins, **CORS)
        guarded = Mount(
            "", routes=routes, middleware=[Middleware(OriginGuard, origins=self.origins)]
        )
        app = Starlette(
            routes=[guarded], middleware=[cors] if self.origins else [], exception_handlers=HANDLERS
        )
        return Observed(app, paths=(TRANSCRIPTIONS, SPEECH), metrics=self.metrics, state=state)

    def _post(self, path: str, answer: Any, kind: str, max_bytes: int) -> Route:
        """Make a route of requests within limits; kind: the media type of their bodies."""
        of: dict[str, Any] = {"limits": self.limits, "state": self.state}
        guard = Middleware(Admission, kind=kind, max_bytes=max_bytes, **of)
        path = path.removeprefix("/v1")
        return Route(path, answer, methods=["POST"], middleware=[guard], max_body_size=max_bytes)

    async def _transcriptions(self, request: Request) -> Response:
        form: FormData = await self._receive(request.form(**FORM), self.limits.max_bytes)
        try:
            fields = Fields.parse(form, self.models)
            recognizer, file, phrases = fields.recognizer, fields.file.file, fields.phrases
            if fields.is_streamed:
                found = recognizer.transcribe(file, times=False, phrases=phrases)
                first = await _until_disconnected(request, anext(found))
                return StreamingResponse(_events(first, found), media_type=EVENTS)
            times = fields.format not in STREAMED
            whole = recognizer.transcript(file, times=times, phrases=phrases)
            transcript = await _until_disconnected(request, whole)
            noted.get()["audio_seconds"] = transcript.seconds
            return answer(transcript, fields)
        finally:
            await form.close()

    async def _speech(self, request: Request) -> Response:
        content = await self._receive(request.body(), LARGEST)
        fields = SpeechFields.parse(content, self.models)
        return await _until_disconnected(request, speech_response(fields))

    async def _receive(self, body: Awaitable[Result], max_bytes: int) -> Result:
        """Receive a body within the limits of its bytes and its time."""
        try:
            async with asyncio.timeout(self.limits.receive_seconds):
                return await body
        except TimeoutError:
            within = f"within {self.limits.receive_seconds:g} s"
            told = f"A request must arrive {within}, but did not. Send less, or compress it."
            raise ApiError(408, told) from None
        except HTTPException as error:
            if error.status_code == 413:
                raise too_large(f"{max_bytes / 1e6:g} MB") from None
            raise

    async def _realtime(self, socket: WebSocket) -> None:
        self.state.require_ready()
        self.models.pick(Recognizer, socket.query_params.get("model", ""))
        if self.state.sessions >= self.limits.max_sessions:
            told = f"At most {self.limits.max_sessions} sessions must be open, but so many are. "
            raise ApiError(429, f"{told}Try again later.")
        self.state.sessions += 1
        self.metrics.sessions.inc()
        of: dict[str, Any] = {"limits": self.limits, "state": self.state, "metrics": self.metrics}
        try:
            await RealtimeSession(socket, models=self.models, **of).run()
        finally:
            self.state.sessions -= 1

    async def _no_upgrade(self, request: Request) -> Response:
        raise ApiError(
            426,
            "`/v1/realtime` needs a WebSocket, but this request has no `Upgrade: websocket`. A "
            "proxy must pass that header on, with HTTP/1.1.",
        )

    async def _models(self, request: Request) -> Response:
        data = [*map(self._model, self.models.names)]
        return JSONResponse({"object": "list", "data": data})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.models.names:
            raise unknown_model(name, self.models.names)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        created = next((each.created for each in self.models.models if each.name == name), 0)
        return {"id": name, "object": "model", "created": created, "owned_by": "sbkit"}

    async def _page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache"}
        content = files("sbkit.serve").joinpath("page.html").read_bytes()
        return HTMLResponse(content, headers=headers)

    async def _card(self, request: Request) -> Response:
        """Describe all recognizers and voices, for the page."""
        cards: dict[str, list[dict[str, Any]]] = {"recognizers": [], "voices": []}
        for model in self.models.models:
            is_recognizer = isinstance(model.engine, Recognizer)
            cards["recognizers" if is_recognizer else "voices"].append(_card_of(model))
        return JSONResponse({"status": self.state.phase, **cards})

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        models = [
            {
                "name": each.name,
                "declared": self.declared,
                "effective": asdict(each.engine.effective),
            }
            for each in self.models.models
        ]
        body = {"status": self.state.phase, "sbkit": __version__, "models": models}
        return JSONResponse(body, 200 if self.state.phase == READY else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.write(), media_type=CONTENT_TYPE_LATEST)


def _card_of(model: Model) -> dict[str, Any]:
    engine, rate = model.engine, model.engine.sample_rate
    card: dict[str, Any] = {"name": model.name, "readme": model.readme, "sample_rate": rate}
    card["effective"] = asdict(engine.effective)
    if isinstance(engine, Recognizer):
        card["language"], card["finds_turns"] = engine.language, engine.silence is not None
        card["chunk_seconds"] = engine.live and samples_to_seconds(engine.live.chunks.step, rate)
    return card


async def _until_disconnected(request: Request, result: Awaitable[Result]) -> Result:
    """Wait for a result, but no longer than the client does; raises ClientDisconnect."""
    task, gone = asyncio.ensure_future(result), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task,))


async def _no_socket(socket: WebSocket) -> None:
    raise HTTPException(404)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    item: str | Transcript, found: AsyncGenerator[str | Transcript]
) -> AsyncIterator[str]:
    """Write server-sent events; item: the first of what is found."""
    async with aclosing(found):
        try:
            while isinstance(item, str):
                if item:
                    yield event("transcript.text.delta", delta=item)
                item = await anext(found)
            noted.get()["audio_seconds"] = item.seconds
            yield event("transcript.text.done", text=item.text)
        except SbkitError as error:
            yield event("error", **as_api_error(error).plain())
