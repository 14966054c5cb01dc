"""What one client may cost: API keys, and limits that hold while a request arrives."""

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from time import monotonic

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbkit.base.errors import SbkitError
from sbkit.base.files import read_text
from sbkit.serve.errors import AGAIN, ApiError, UnavailableError
from sbkit.serve.state import State

LARGEST_KEYS = 1 << 20  # bytes of a file of keys


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a request may be, how many there may be, and how long they may take.

    max_mb: of a body, in 10^6 bytes (OpenAI takes 25); max_seconds: of audio; max_concurrent:
    requests that are transcribed at a time; max_queue: those that arrive or wait beside them;
    receive_seconds: within which a body arrives; answer_seconds: within which the answer does.
    """

    max_mb: float = 25.0
    max_seconds: float = 7200.0
    max_concurrent: int = 32
    max_queue: int = 128
    receive_seconds: float = 60.0
    answer_seconds: float = 600.0

    def __post_init__(self) -> None:
        """Raise SbkitError where one is below what lets a request pass."""
        for name, value in asdict(self).items():
            low = 0 if name == "max_queue" else 1
            if not value >= low:
                raise SbkitError(
                    f"`--{name.replace('_', '-')}` must be at least {low}, but is {value}. "
                    "Raise it."
                )


def read_keys(file: Path) -> list[str]:
    """Read API keys, one on each line; raises SbkitError where there is none."""
    lines = read_text(file, largest=LARGEST_KEYS, what="`--api-key-file`")
    keys = [each.strip() for each in lines if each.strip()]
    if not keys:
        raise SbkitError(
            f"`--api-key-file` must have a key on each line, but {file} has none. Write one."
        )
    return keys


class KeyGuard:
    """Let pass what has one of the keys as its bearer token, or everything where there are none."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app, self._digests = app, [_digest(each) for each in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or raise ApiError."""
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip() if kind.lower() == "bearer" else "")
        # All are compared, each in a time that does not depend on what is equal.
        found = sum([hmac.compare_digest(given, each) for each in self._digests])
        if self._digests and not found:
            raise ApiError(
                HTTPStatus.UNAUTHORIZED,
                "A request must have a key of this server, but has none or another one. Send the "
                "header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


class Admission:
    """Count the requests that are in flight, and hold each to the limits while it arrives."""

    def __init__(self, app: ASGIApp, *, limits: Limits, state: State) -> None:
        self._app, self._limits, self._state = app, limits, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on within the limits, or raise ApiError."""
        limits, state = self._limits, self._state
        state.require_ready()
        _check_headers(Headers(scope=scope), limits)
        if state.in_flight >= limits.max_concurrent + limits.max_queue:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"At most {limits.max_concurrent + limits.max_queue} requests must be in flight, "
                "but so many are. Try again later.",
                code="rate_limit_exceeded",
                headers=AGAIN,
            )
        with state.counted():
            try:
                async with asyncio.timeout(limits.answer_seconds):
                    await self._app(scope, _limited(receive, limits), send)
            except TimeoutError:
                raise UnavailableError(
                    f"An answer must be there within {limits.answer_seconds:g} s, but is not. Try "
                    "again later, or with less audio."
                ) from None
            except asyncio.CancelledError:
                state.require_ready()  # where the time to stop is over
                raise


def _check_headers(headers: Headers, limits: Limits) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"A request must be a form (multipart/form-data), but is {kind or 'of no type'}. Send "
            "the audio in its field `file`.",
        )
    if int(headers.get("content-length") or 0) > limits.max_mb * 1e6:
        raise _too_large(limits)


def _limited(receive: Receive, limits: Limits) -> Receive:
    """Return what receives a body, and raises ApiError over its bytes and its time."""
    until, total, is_whole = monotonic() + limits.receive_seconds, 0, False

    async def limited() -> Message:
        nonlocal total, is_whole
        if is_whole:  # what comes is the end of the connection
            return await receive()
        try:
            async with asyncio.timeout(until - monotonic()):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"A request must arrive within {limits.receive_seconds:g} s, but did not. Send "
                "less, or compressed audio.",
            ) from None
        total += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if total > limits.max_mb * 1e6:
            raise _too_large(limits)
        return message

    return limited


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"A request must have at most {limits.max_mb:g} MB, but has more. Send it in parts, or "
        "compress its audio.",
        param="file",
    )
