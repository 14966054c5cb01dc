"""The application: transcripts, models, health and metrics, as routes of Starlette."""

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from sbkit.base.errors import SbkitError
from sbkit.base.text import __version__
from sbkit.base.units import samples_to_seconds
from sbkit.inference.transcribe.transcriber import Transcript
from sbkit.serve.answers import answer, event
from sbkit.serve.errors import HANDLERS, ApiError, as_api_error, too_large
from sbkit.serve.fields import parse_fields, unknown_model
from sbkit.serve.limits import READY, Admission, KeyGuard, Limits, State
from sbkit.serve.metrics import Observed
from sbkit.serve.realtime import RealtimeSession
from sbkit.serve.recognizer import Recognizer

Found = AsyncGenerator[str | Transcript]
TRANSCRIPTIONS = "/v1/audio/transcriptions"
FORM = {"max_files": 1, "max_fields": 100, "max_part_size": 1 << 16}  # bytes of a field
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the routes answer from.

    names: of the model, its own first; created: when its bundle was, in seconds since 1970;
    declared: what was asked for of device, runtime and precision; readme: of the bundle.
    """

    recognizer: Recognizer
    limits: Limits
    names: Sequence[str]
    created: int
    declared: dict[str, str]
    state: State
    readme: str = ""

    def app(self, keys: Sequence[str]) -> Starlette:
        """Make the application; keys: those that clients may have, none for all clients."""
        figures, state, limits = self.recognizer.metrics, self.state, self.limits
        figures.show("requests_in_flight", "that arrive, wait or run", lambda: state.in_flight)
        figures.show("sessions_open", "realtime ones", lambda: state.sessions)
        transcriptions = Route(
            TRANSCRIPTIONS.removeprefix("/v1"),
            self._transcriptions,
            methods=["POST"],
            middleware=[Middleware(Admission, limits=limits, state=state)],
            max_body_size=limits.max_bytes,
        )
        realtime = WebSocketRoute("/realtime", self._realtime)
        models = Route("/models", self._models), Route("/models/{name:path}", self._one_model)
        guard = Middleware(KeyGuard, keys=keys)
        routes = [
            Mount("/v1", routes=[transcriptions, realtime, *models], middleware=[guard]),
            Route("/", self._page),
            Route("/card", self._card),
            Route("/health/live", self._live),
            Route("/health/ready", self._ready),
            Route("/metrics", self._metrics),
        ]
        observed = Middleware(Observed, path=TRANSCRIPTIONS, metrics=figures)
        return Starlette(routes=routes, middleware=[observed], exception_handlers=HANDLERS)

    async def _transcriptions(self, request: Request) -> Response:
        form = await self._receive(request)
        try:
            language = self.recognizer.language
            fields = parse_fields(form, names=self.names, language=language)
            if fields.is_streamed:
                found = self.recognizer.transcribe(fields)
                first = await _until_disconnected(request, anext(found))
                return StreamingResponse(_events(first, found), media_type="text/event-stream")
            whole = self.recognizer.transcript(fields)
            return answer(await _until_disconnected(request, whole), fields, language)
        finally:
            await form.close()

    async def _receive(self, request: Request) -> FormData:
        """Receive a form within the limits of its bytes and its time."""
        try:
            async with asyncio.timeout(self.limits.receive_seconds):
                return await request.form(**FORM)
        except TimeoutError:
            within = f"within {self.limits.receive_seconds:g} s"
            told = f"A request must arrive {within}, but did not. Send less, or compress it."
            raise ApiError(408, told) from None
        except HTTPException as error:
            if error.status_code == 413:
                raise too_large(f"{self.limits.max_mb:g} MB") from None
            raise

    async def _realtime(self, socket: WebSocket) -> None:
        self.state.require_ready()
        if (model := socket.query_params.get("model", self.names[0])) not in self.names:
            raise unknown_model(model, self.names)
        if self.state.sessions >= self.limits.max_sessions:
            told = f"At most {self.limits.max_sessions} sessions must be open, but so many are. "
            raise ApiError(429, f"{told}Try again later.")
        self.state.sessions += 1
        self.recognizer.metrics.sessions.inc()
        try:
            await RealtimeSession(socket, self.recognizer, self.names, self.state).run()
        finally:
            self.state.sessions -= 1

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self._model, self.names)]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.names:
            raise unknown_model(name, self.names)
        return JSONResponse(self._model(name))

    async def _page(self, request: Request) -> Response:
        """Send the page, whose policy lets it ask this server alone, for what it has in itself."""
        content = files("sbkit.serve").joinpath("page.html").read_bytes()
        own = [
            re.search(b"<%s>(.*?)</" % each, content, re.DOTALL) for each in (b"style", b"script")
        ]
        style, script = (b64encode(sha256(each[1]).digest()).decode() for each in own if each)
        policy = (
            f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}' blob:; "
            "connect-src 'self'; media-src blob:; img-src data:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'"
        )
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        return HTMLResponse(content, headers=headers)

    async def _card(self, request: Request) -> Response:
        """Describe the model, for the page."""
        live, at = self.recognizer.live, self.recognizer.sample_rate
        content = {
            "name": self.names[0],
            "status": self.state.phase,
            "language": self.recognizer.language,
            "sample_rate": at,
            "chunk_seconds": live and samples_to_seconds(live.chunks.step, at),
            "effective": asdict(self.recognizer.effective),
            "readme": self.readme,
        }
        return JSONResponse(content)

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        body = {
            "status": self.state.phase,
            "model": self.names[0],
            "sbkit": __version__,
            "declared": self.declared,
            "effective": asdict(self.recognizer.effective),
        }
        return JSONResponse(body, 200 if self.state.phase == READY else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.recognizer.metrics.write(), media_type=CONTENT_TYPE_LATEST)

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "sbkit"}


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


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(item: str | Transcript, found: Found) -> AsyncIterator[str]:
    """Write server-sent events; item: the first of what is found."""
    text = ""
    async with aclosing(found):
        try:
            while isinstance(item, str):
                if item:
                    more = f" {item}" if text else item
                    text += more
                    yield event("transcript.text.delta", delta=more)
                item = await anext(found)
            yield event("transcript.text.done", text=item.text)
        except SbkitError as error:
            yield event("error", **as_api_error(error).plain())
