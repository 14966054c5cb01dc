"""What one client may cost, and whether any is served: keys, limits, and the server's phase."""

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_text
from sbkit.serve.errors import ApiError, too_large

LARGEST_KEYS = 1 << 20  # bytes of a file of keys
KEY = "openai-insecure-api-key."
WARMING, READY, DRAINING = "warming up", "ready", "draining"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a request may be, how many there may be, and how long they may take.

    max_mb: of a body, in 10^6 bytes (OpenAI takes 25); max_seconds: of audio; max_concurrent:
    requests that are worked on at a time; max_queue: those that arrive or wait beside them;
    max_sessions: realtime sessions, and their audio is limited turn by turn;
    receive_seconds: within which a body arrives; answer_seconds: within which its answer is sent.
    """

    max_mb: float = 25.0
    max_seconds: float = 7200.0
    max_concurrent: int = 32
    max_queue: int = 128
    max_sessions: int = 64
    receive_seconds: float = 60.0
    answer_seconds: float = 600.0

    @property
    def max_bytes(self) -> int:
        """The largest body."""
        return round(self.max_mb * 1e6)


@dataclass
class State:
    """The phase of a server, its requests in flight, and what has ended its warm-up.

    sessions: realtime ones that are open; stopping: set where they are to end.
    """

    phase: str = WARMING
    in_flight: int = 0
    sessions: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None

    def require_ready(self) -> None:
        """Raise ApiError in another phase."""
        if self.phase != READY:
            told = f"The server must be ready to take audio, but is {self.phase}. Try again later."
            raise ApiError(503, told)


def read_keys(file: Path) -> list[str]:
    """Read API keys, one on each line; raises SbkitError where there is none."""
    lines = read_text(file, largest=LARGEST_KEYS, what="`--api-key-file`")
    keys = [each.strip() for each in lines if each.strip()]
    if not keys:  # the server would be open to all
        raise SbkitError(f"`--api-key-file` must have keys, but {file} is empty. Write one a line.")
    return keys


class KeyGuard:
    """Let pass what has one of the keys; everything, where there are none.

    It is the bearer token, or of a WebSocket a subprotocol: browsers set no other header.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app, self._digests = app, [_digest(each) for each in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or raise ApiError."""
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        offered = [each for each in scope.get("subprotocols", ()) if each.startswith(KEY)]
        key = key.strip() if scheme.lower() == "bearer" else "".join(offered).removeprefix(KEY)
        given = _digest(key)
        # All are compared, each in a time that does not depend on what is equal.
        found = sum([hmac.compare_digest(given, each) for each in self._digests])
        if self._digests and not found:
            raise ApiError(
                401,
                "A request must have a key of this server, but has none or another one. Send the "
                "header `Authorization: Bearer KEY`.",
            )
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


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
