"""Answers other than 200, in the form of OpenAI's API: {"error": {message, type, param, code}}."""

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from sbkit.base.errors import SbkitError

CLIENT_GONE = 499  # nobody reads it; metrics count it, as nginx's do
CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
HEADERS = {status: {"Retry-After": "1"} for status in (429, 503)}  # seconds
HEADERS[426] = {"Upgrade": "websocket", "Connection": "Upgrade"}


class ApiError(SbkitError):
    """An answer of another status than 200; param: the field that is at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, *, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.code = CODES.get(status) if code is None else code

    def plain(self) -> dict[str, dict[str, str | None]]:
        """Return the body; type and code are those which the API has for the status."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        content = {"message": str(self), "type": kind, "param": self.param}
        return {"error": {**content, "code": self.code}}


def too_large(most: str, name: str = "file") -> ApiError:
    """Return the error over a file, or audio, with more than so many bytes or seconds."""
    return ApiError(413, f"`{name}` must have at most {most}, but has more. Send parts.", name)


def as_api_error(error: Exception) -> ApiError:
    """Take an error of ours, of Starlette's (404, a broken form), or a fault of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        told = f"A request must be one of this API, but is not ({error.detail}). Correct it."
        return ApiError(error.status_code, told)
    return ApiError(500, "A request must be answered, but the server failed; its log says why.")


def _answer(_: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    found = as_api_error(error)
    return JSONResponse(found.plain(), found.status, headers=HEADERS.get(found.status))


HANDLERS: Mapping[type[Exception], ExceptionHandler] = dict.fromkeys(
    (ApiError, HTTPException, ClientDisconnect, Exception), _answer
)
