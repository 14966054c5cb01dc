"""What one client may cost, and whether any is served: keys, limits, and the server's phase."""

import asyncio
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_text
from sbkit.serve.errors import ApiError, too_large

LARGEST_KEYS = 1 << 20  # bytes of a file of keys
KEY = "openai-insecure-api-key."
WARMING, READY, DRAINING, STOPPING = "warming up", "ready", "draining", "stopping"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a request may be, how many there may be, and how long they may take.

    max_mb: of a body, in 10^6 bytes (OpenAI takes 25); max_seconds: of audio; max_concurrent:
    requests that are worked on at a time; max_queue: those that arrive or wait beside them;
    max_sessions: realtime sessions, and their audio is limited turn by turn; max_session_seconds:
    from the start of a session to its end; max_connections: of clients, whatever they do;
    receive_seconds: within which a body arrives; answer_seconds: within which its answer is sent;
    drain_seconds: after SIGTERM, in which requests are taken; grace_seconds: to finish them then.
    """

    max_mb: float = 25.0
    max_seconds: float = 7200.0
    max_concurrent: int = 32
    max_queue: int = 128
    max_sessions: int = 64
    max_session_seconds: float = 7200.0
    max_connections: int = 1000
    receive_seconds: float = 60.0
    answer_seconds: float = 600.0
    drain_seconds: float = 5.0
    grace_seconds: float = 30.0

    @property
    def max_bytes(self) -> int:
        """The largest body."""
        return round(self.max_mb * 1e6)


@dataclass
class State:
    """The phase of a server, its requests in flight, and what has ended its warm-up.

    While it drains it takes requests, but is not ready: load balancers send new ones elsewhere.
    sessions: realtime ones that are open; stopping: set where they are to end.
    """

    phase: str = WARMING
    in_flight: int = 0
    sessions: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None

    def require_ready(self) -> None:
        """Raise ApiError in a phase in which no requests are taken."""
        if self.phase not in (READY, DRAINING):
            told = f"The server must be ready to take audio, but is {self.phase}. Try again later."
            raise ApiError(503, told)


def read_keys(file: Path) -> list[str]:
    """Read API keys, one on each line; raises SbkitError where there is none."""
    lines = read_text(file, max_bytes=LARGEST_KEYS, subject="`--api-key-file`")
    keys = [each.strip() for each in lines if each.strip()]
    if not keys:  # the server would be open to all
        raise SbkitError(f"`--api-key-file` must have keys, but {file} is empty. Write one a line.")
    return keys


class Keys:
    """The keys of a file; without a file there are none."""

    def __init__(self, file: Path | None = None) -> None:
        self._file, self.digests = file, list[bytes]()
        self.read()

    def read(self) -> None:
        """Read the file, again too; raises SbkitError where it has no keys."""
        if self._file is not None:
            self.digests = [*map(_digest, read_keys(self._file))]


class KeyGuard:
    """Admit requests that have one of the keys. If there are no keys, admit all.

    It is the bearer token, or of a WebSocket a subprotocol: browsers set no other header.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or raise ApiError."""
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        offered = [each for each in scope.get("subprotocols", ()) if each.startswith(KEY)]
        key = key.strip() if scheme.lower() == "bearer" else "".join(offered).removeprefix(KEY)
        given, digests = _digest(key), self._keys.digests
        # All are compared, each in a time that does not depend on what is equal.
        found = sum([hmac.compare_digest(given, digest) for digest in digests])
        if digests and not found:
            raise ApiError(
                401,
                "A request must have a key of this server, but has none or another one. Send the "
                "header `Authorization: Bearer KEY`.",
            )
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


class OriginGuard:
    """Refuse requests of other sites' pages, and hosts that such a page may have chosen.

    A browser tells the origin of a page with each POST and WebSocket; other programs tell none. By
    DNS rebinding a site's name leads here, and its pages are of the same origin: names with a dot
    must be allowed, while addresses and local names are no site's.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        """Take the origins that are allowed beside the server's own, ``*`` for all."""
        self._app, self._origins = app, [origin.lower() for origin in origins]
        self._names = {_name_of(origin.partition("://")[2]) for origin in self._origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or raise ApiError."""
        headers = Headers(scope=scope)
        if {"content-length", "transfer-encoding"} <= {*headers}:
            error = ApiError(
                400, "A request has Content-Length or Transfer-Encoding, but not both."
            )
            answer = JSONResponse(error.plain(), error.status, {"Connection": "close"})
            await answer(scope, receive, send)  # what follows may be smuggled (RFC 9112, 6.1)
            return
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        allowed = ["", f"http://{host}", f"https://{host}", *self._origins]
        told = f"`--allow-origin {origin or f'http://{host}'}` of the server would allow it."
        if "*" not in allowed and origin not in allowed:
            raise ApiError(403, f"A page of {origin} may not use this server. {told}")
        if "*" not in allowed and not self._is_allowed(_name_of(host)):
            raise ApiError(403, f"This server is not called {host}. {told}")
        await self._app(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        if "." not in name or name.endswith(".localhost") or name in self._names:
            return True
        try:
            return bool(ip_address(name))
        except ValueError:
            return False


def _name_of(host: str) -> str:
    """Return a host without its port, an IPv6 address without its brackets."""
    return re.sub(r":\d+$", "", host).strip("[]")


class Admission:
    """Count the requests that are in flight, and refuse by its header what is over a limit."""

    def __init__(
        self, app: ASGIApp, *, kind: str, max_bytes: int, limits: Limits, state: State
    ) -> None:
        """Take requests of one media type, whose bodies have at most so many bytes."""
        self._app, self._kind, self._max_bytes = app, kind, max_bytes
        self._limits, self._state = limits, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or raise ApiError before or after the time that an answer may take."""
        limits, state = self._limits, self._state
        state.require_ready()
        self._check(Headers(scope=scope))
        state.in_flight += 1
        try:
            async with asyncio.timeout(limits.answer_seconds):
                await self._app(scope, receive, send)
        except TimeoutError:
            raise ApiError(
                503,
                f"An answer must be there within {limits.answer_seconds:g} s, but is not. Try "
                "again later, or with less.",
            ) from None
        except asyncio.CancelledError:
            state.require_ready()  # where the grace time is over
            raise
        finally:
            state.in_flight -= 1

    def _check(self, headers: Headers) -> None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != self._kind:
            told = f"A request must be {self._kind}, but is {kind or 'of no type'}. Send that."
            raise ApiError(415, told)
        if int(headers.get("content-length", 0)) > self._max_bytes:
            raise too_large(f"{self._max_bytes / 1e6:g} MB", "body")
        most = self._limits.max_concurrent + self._limits.max_queue
        if self._state.in_flight >= most:
            told = f"At most {most} requests must be in flight, but so many are. Try again later."
            raise ApiError(429, told)
