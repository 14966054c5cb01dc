"""The server: listen, warm up, answer, and stop in order."""

import asyncio
import ctypes
import json
import resource
import signal
import socket
import struct
import threading
from asyncio import Transport
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from sbkit.base.errors import INTERRUPTED, SbkitError
from sbkit.serve.app import Service
from sbkit.serve.errors import ApiError
from sbkit.serve.limits import DRAINING, READY, STOPPING, WARMING, Keys
from sbkit.serve.metrics import LOGGER

HEADER_SECONDS = 10.0  # within which a connection sends the header of a request
PROBE_SECONDS = 1.0  # between two looks whether a client that sends no more is there
PING_SECONDS = 20.0  # from a pong to the next ping, and within which it is answered
ACCEPT_SECONDS = 0.1  # to accept the last connections
SO_ATTACH_FILTER, DROP_ALL = 26, struct.pack("HBBI", 6, 0, 0, 0)  # Linux: a filter, "return 0"
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
    """Limit connections and the time of each header: uvicorn waits for ever for one that began."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for the header of a request, or refuse one connection too many."""
        super().connection_made(transport)
        self._await_header()
        if len(self.connections) >= (self.config.limit_concurrency or 0):
            self._refuse(ApiError(503, "There are too many connections. Try again later."))

    def data_received(self, data: bytes) -> None:
        """Go on to wait for a header, until it is there."""
        super().data_received(data)
        self._await_header()

    def _await_header(self) -> None:
        if self._is_answering and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif not self._is_answering and self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._close_unused)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_unused(self) -> None:
        if not self._is_answering and self.transport.get_protocol() is self:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to answer: a client that has gone looks like one that sends no more.

        Both are sent what clients skip (RFC 9110, 15.2), again and again: the first resets it.
        """
        is_waiting = self._is_answering and not self.cycle.more_body | self.cycle.response_started
        is_here = is_waiting and not self.transport.is_closing()
        if not is_here or self.conn.their_http_version != b"1.1":
            return False
        self.cycle.keep_alive = False
        probe = h11.InformationalResponse(status_code=100, headers=[])
        self.transport.write(self.conn.send(probe) or b"")
        self.loop.call_later(PROBE_SECONDS, self.eof_received)
        return True

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.plain()).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        response = h11.Response(
            status_code=error.status, headers=[*headers.items(), ("Connection", "close")]
        )
        for part in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


class Socket(WebSocketsSansIOProtocol):
    """Drop a client that answers no ping: uvicorn waits for it to read all before it closes."""

    async def send(self, message: Any) -> None:
        """Send; a refused handshake is complete, over which uvicorn would log an error."""
        await super().send(message)
        self.handshake_complete |= message["type"] == "websocket.http.response.body"

    def keepalive_timeout(self) -> None:
        """End the connection now."""
        super().keepalive_timeout()
        self.transport.abort()


class Server(uvicorn.Server):
    """Listen, warm up, and stop as asked: not ready, what is queued is finished, then the end."""

    def __init__(self, service: Service, *, keys: Keys) -> None:
        """Take what the routes answer from, and the keys that clients may have."""
        super().__init__(
            uvicorn.Config(
                service.app(keys),
                http=Protocol,
                limit_concurrency=service.limits.max_connections + 1,
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
        self._service, self._state, self._keys = service, service.state, keys
        self._asked: int | None = None  # the signal
        self._drained = self._until = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, say where, and begin to warm up."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file for each connection
        self._listening = sockets or []
        await super().startup(sockets)
        for listening in self._listening:
            host, port = listening.getsockname()[:2]
            where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            names = ", ".join(each.name for each in self._service.models.models)
            LOGGER.info("serving %s at %s", names, where)
        for model in self._service.models.models:
            LOGGER.info("running on %s", model.engine.effective)
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.read_keys)
        threading.Thread(target=self._warm_up, name="warm-up", daemon=True).start()

    def read_keys(self) -> None:
        """Read the keys again; where that fails, keep the ones before."""
        try:
            self._keys.read()
            LOGGER.info("read %d keys again", len(self._keys.digests))
        except SbkitError as error:
            LOGGER.error("kept the keys: %s", error)

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
        """Begin to stop, on Ctrl-C without a pause; a second signal ends pause and grace time."""
        limits, is_first = self._service.limits, self._asked is None
        pause = limits.drain_seconds if is_first and sig == signal.SIGTERM else 0.0
        self._drained = monotonic() + pause
        self._until = self._drained + limits.grace_seconds * is_first
        self._asked, self._state.phase = sig, DRAINING

    async def on_tick(self, counter: int) -> bool:
        """Return whether to leave, ten times a second."""
        if self._asked is not None and monotonic() >= self._drained:
            self._state.phase = STOPPING
            self._state.stopping.set()
            if not self._state.in_flight + self._state.sessions or monotonic() > self._until:
                await self._stop_listening()
                return True
        return self._state.failure is not None or await super().on_tick(counter)

    async def _stop_listening(self) -> None:
        """Stop listening, and answer who has connected: closing resets what is not accepted yet.

        So the system drops what comes for new connections first, until the others are accepted.
        """
        program = ctypes.create_string_buffer(DROP_ALL)
        for listening in self._listening:
            with suppress(OSError):  # no Linux
                described = struct.pack("HP", 1, ctypes.addressof(program))
                listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)
        await asyncio.sleep(ACCEPT_SECONDS)
        for server in self.servers:
            server.close()
        until = monotonic() + CUT_OFF
        while self.server_state.connections and monotonic() < until:
            await asyncio.sleep(0.01)

    def exit_code(self) -> int:
        """Return the code of the signal that ended the server, or raise what failed."""
        if self._asked is None and self._state.failure is not None:
            raise self._state.failure
        return INTERRUPTED if self._asked == signal.SIGINT else 0
