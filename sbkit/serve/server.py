"""The process of a server: listen, warm up, and answer until a signal."""

import asyncio
import resource
import socket
import sys
import threading
from ipaddress import ip_address

import uvicorn

from sbkit.base.errors import ConfigError
from sbkit.serve.app import Service
from sbkit.serve.middleware import logger

KEEP_ALIVE_SECONDS = 75  # proxies reuse their connections for 60 s
STOP_SECONDS = 30  # after a signal, for requests in flight
MAX_HEADER_BYTES = 1 << 15  # as nginx passes on
UNREAD_SECONDS = 30.0  # without a read by the client, until its connection is closed
PING_SECONDS = 20.0  # from a pong to the next ping, and for the pong to arrive
# Connections for each request and session that the server admits. uvicorn refuses any further ones,
# even for health checks.
CONNECTIONS_PER_REQUEST = 10


def bind(host: str, port: int) -> socket.socket:
    """Listen at an address; raises ConfigError if it is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"The server cannot listen at {host}, port {port} ({error}).") from error
    if sys.platform == "linux":  # elsewhere, connections stay open whose clients read nothing
        milliseconds = round(1000 * UNREAD_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


class Server(uvicorn.Server):
    """A server that closes its port for Wyoming clients once it admits no more requests."""

    wyoming: asyncio.Server | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.wyoming is not None:
            self.wyoming.close()
        await super().shutdown(sockets)


def make_server(service: Service) -> Server:
    """Set uvicorn up for a service."""
    limits = service.limits
    max_requests = limits.max_concurrent + limits.max_queue + limits.max_sessions
    config = uvicorn.Config(
        service.app(),
        http="h11",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        limit_concurrency=CONNECTIONS_PER_REQUEST * max_requests,
        ws="websockets-sansio",
        ws_max_size=1 << 24,  # bytes of a message
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level="critical",  # `Observer` logs requests and errors
        access_log=False,
        server_header=False,
    )
    return Server(config)


def run(
    server: Server,
    service: Service,
    listener: socket.socket,
    wyoming: socket.socket | None = None,
) -> None:
    """Warm up and answer until a signal; raises the error of a warm-up that fails.

    wyoming: listens for clients of Home Assistant's protocol.
    """
    failures: list[Exception] = []

    def warm_up() -> None:
        try:
            service.warm_up()
        except Exception as error:  # of the model, the device or its memory
            failures.append(error)
            server.should_exit = True

    async def answer() -> None:
        if wyoming is not None:
            from sbkit.serve.wyoming import listen

            server.wyoming = await listen(service, wyoming)
        await server.serve(sockets=[listener])

    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # one per connection
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    models = service.models.models
    logger.info("serving %s at %s", ", ".join(model.name for model in models), url)
    if wyoming is not None:
        wyoming_host, wyoming_port = wyoming.getsockname()[:2]
        is_open = not ip_address(wyoming_host).is_loopback
        note = ": it has no keys, so whoever reaches it can use the models" if is_open else ""
        logger.info("serving Wyoming at %s, port %s%s", wyoming_host, wyoming_port, note)
    for model in models:
        logger.info("running on %s", model.engine.runs_on)
    threading.Thread(target=warm_up, name="warm-up", daemon=True).start()
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(answer())
    if failures:
        raise failures[0]
