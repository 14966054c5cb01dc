"""The server: listen, warm up, answer, and stop in order."""

import resource
import signal
import socket
import sys
import threading
from asyncio import Transport
from collections.abc import Sequence
from time import monotonic
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from sbkit.base.errors import ASKED_TO_STOP, INTERRUPTED, SbkitError
from sbkit.serve.app import Service
from sbkit.serve.limits import DRAINING, READY, WARMING

FIRST_REQUEST = 10.0  # seconds, within which a connection sends its header
PING_SECONDS = 20.0  # from a pong to the next ping, and within which it is answered
CUT_OFF = 1  # seconds between the end of the grace time and that of the connections


def bind(host: str, port: int) -> socket.socket:
    """Take an address, before the model is loaded; raises SbkitError where it is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise SbkitError(
            f"`--host` and `--port` must be an address that is free here, but {host}:{port} is not "
            f"({error}). Choose another one."
        ) from error


class Protocol(H11Protocol):
    """Close a connection that sends no request: uvicorn waits for the first one for ever."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for the header of a request."""
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST, self._close_unused)

    def _close_unused(self) -> None:
        if self.cycle is None and self.transport.get_protocol() is self:
            self.transport.close()


class Socket(WebSocketsSansIOProtocol):
    """Drop a client that answers no ping: uvicorn waits for it to read all before it closes."""

    def keepalive_timeout(self) -> None:
        """End the connection now."""
        super().keepalive_timeout()
        self.transport.abort()


class Server(uvicorn.Server):
    """Listen, warm up, and stop as asked: not ready, what is queued is finished, then the end."""

    def __init__(self, service: Service, *, keys: Sequence[str], grace_seconds: float) -> None:
        """Take what the routes answer from, and the keys that clients may have."""
        super().__init__(
            uvicorn.Config(
                service.app(keys),
                http=Protocol,
                ws=Socket,
                ws_per_message_deflate=False,
                ws_ping_interval=PING_SECONDS,
                ws_ping_timeout=PING_SECONDS,
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=CUT_OFF,
            )
        )
        self._service, self._state, self._grace = service, service.state, grace_seconds
        self._asked: int | None = None  # the signal
        self._until = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, say where, and begin to warm up."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file for each connection
        await super().startup(sockets)
        for each in sockets or []:
            host, port = each.getsockname()[:2]
            where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            names = ", ".join(each.name for each in self._service.models.models)
            print(f"serving {names} at {where}", file=sys.stderr)
        for model in self._service.models.models:
            print(f"running on {model.engine.effective}", file=sys.stderr, flush=True)
        threading.Thread(target=self._warm_up, name="warm-up", daemon=True).start()

    def _warm_up(self) -> None:
        try:
            for model in self._service.models.models:
                model.engine.warm_up()
        except Exception as error:  # of the model, the device or its memory
            self._state.failure = error
        else:
            if self._state.phase == WARMING:
                self._state.phase = READY

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second signal ends the grace time."""
        grace = self._grace if self._asked is None else 0.0
        self._until = monotonic() + grace
        self._asked, self._state.phase = sig, DRAINING

    async def on_tick(self, counter: int) -> bool:
        """Return whether to leave, ten times a second."""
        if self._asked is not None:
            self._state.stopping.set()
            if not self._state.in_flight + self._state.sessions or monotonic() > self._until:
                return True
        return self._state.failure is not None or await super().on_tick(counter)

    def exit_code(self) -> int:
        """Return the code of the signal that ended the server, or raise what failed."""
        if self._asked is None and self._state.failure is not None:
            raise self._state.failure
        return INTERRUPTED if self._asked == signal.SIGINT else ASKED_TO_STOP
