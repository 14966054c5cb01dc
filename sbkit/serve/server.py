"""The server: listen, warm up, answer, and stop in order.

Only this module depends on details of uvicorn; tested with uvicorn 0.54.0.
"""

import asyncio
import resource
import signal
import socket
import threading
from asyncio import Transport
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from sbkit.base.errors import INTERRUPTED, ConfigError, SbkitError
from sbkit.serve.app import Service
from sbkit.serve.middleware import DRAINING, READY, STOPPING, WARMING, ApiKeys, logger

HEADER_SECONDS = 10.0  # for a client to send the header of a request
PING_SECONDS = 20.0  # from a pong to the next ping, and for the pong to arrive
# For connections that were accepted just before the end. Under 24 clients, a stop reset 2 to 20
# requests without this pause, and at most one with it, whose connection was not yet accepted.
LAST_ANSWER_SECONDS = 0.1
CLOSE_SECONDS = 1  # for connections to close after the grace time


def bind(host: str, port: int) -> socket.socket:
    """Listen at an address; raises ConfigError if it is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"The server cannot listen at {host}, port {port} ({error}).") from error


class Protocol(H11Protocol):
    """Limit the time for each header, which uvicorn does not limit."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
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


class Socket(WebSocketsSansIOProtocol):
    """Drop a client that answers no ping; uvicorn would wait until it has read everything."""

    async def send(self, message: Any) -> None:
        """Send; raises ClientDisconnected if uvicorn has just closed, as after too large a message.

        uvicorn raises RuntimeError, which the log would show as a fault of the server.
        """
        if self.close_sent and message["type"] == "websocket.send":
            raise ClientDisconnected
        await super().send(message)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()


class Server(uvicorn.Server):
    """Listen, warm up, and stop on a signal: drain, finish queued requests, then exit."""

    def __init__(self, service: Service, *, keys: ApiKeys) -> None:
        super().__init__(
            uvicorn.Config(
                service.app(keys),
                http=Protocol,
                timeout_keep_alive=75,  # proxies reuse their connections for 60 s
                limit_concurrency=service.limits.max_connections + 1,
                ws=Socket,
                ws_per_message_deflate=False,
                ws_ping_interval=PING_SECONDS,
                ws_ping_timeout=PING_SECONDS,
                lifespan="off",
                log_config=None,
                log_level="critical",  # `Observer` logs errors
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self._service = service
        self._state = service.state
        self._keys = keys
        self._stop_signal: int | None = None
        self._drain_end = self._grace_end = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, log the address, and start the warm-up."""
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # one per connection
        await super().startup(sockets)
        models = self._service.models.models
        for listening in sockets or ():
            host, port = listening.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            logger.info("serving %s at %s", ", ".join(model.name for model in models), url)
        for model in models:
            logger.info("running on %s", model.engine.effective)
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.read_keys)
        threading.Thread(target=self._warm_up, name="warm-up", daemon=True).start()

    def read_keys(self) -> None:
        """Read the keys again; if that fails, keep the previous ones."""
        try:
            self._keys.read()
            logger.info("read %d keys again", len(self._keys.digests))
        except SbkitError as error:
            logger.error("kept the keys: %s", error)

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
        """Start to stop; Ctrl-C skips the drain time, and a second signal also the grace time."""
        limits = self._service.limits
        is_first = self._stop_signal is None
        drain_seconds = limits.drain_seconds if is_first and sig == signal.SIGTERM else 0.0
        self._drain_end = monotonic() + drain_seconds
        self._grace_end = self._drain_end + limits.grace_seconds * is_first
        self._stop_signal = sig
        self._state.phase = DRAINING

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit; uvicorn calls this ten times a second."""
        if self._stop_signal is not None and monotonic() >= self._drain_end:
            self._state.phase = STOPPING
            self._state.stopping.set()
            is_idle = not self._state.in_flight + self._state.sessions
            if is_idle or monotonic() > self._grace_end:
                for server in self.servers:
                    server.close()
                await asyncio.sleep(LAST_ANSWER_SECONDS)
                return True
        return self._state.failure is not None or await super().on_tick(counter)

    def exit_code(self) -> int:
        """Return the exit code after a signal, or raise the error that ended the server."""
        if self._stop_signal is None and self._state.failure is not None:
            raise self._state.failure
        return INTERRUPTED if self._stop_signal == signal.SIGINT else 0
