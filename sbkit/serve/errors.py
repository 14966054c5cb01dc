"""Answers other than 200, in the form of OpenAI's API: {"error": {message, type, param, code}}."""

from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from sbkit.base.errors import SbkitError

CLIENT_GONE = 499  # which nobody reads; metrics count it, as nginx does
AGAIN = {"Retry-After": "1"}  # seconds


class ApiError(SbkitError):
    """An answer of another status than 200; param: the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def plain(self) -> dict[str, dict[str, str | None]]:
        """Return the body; its type is that which the API has for the status."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class UnavailableError(ApiError):
    """The server is not ready yet, stops, or takes too long."""

    def __init__(self, message: str) -> None:
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, message, headers=AGAIN)


def as_api_error(error: Exception) -> ApiError:
    """Take an error of ours, of Starlette's (404, a broken form), or a fault of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(
            error.status_code,
            f"A request must be one of this API, but is not ({error.detail}). Correct it.",
            headers=error.headers,
        )
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "The server must answer every request, but failed over this one. Its log says why.",
    )


def _answer_error(_: Request, error: Exception) -> Response:
    found = as_api_error(error)
    return JSONResponse(found.plain(), found.status, headers=found.headers)


def _answer_nobody(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


HANDLERS: Mapping[type[Exception], ExceptionHandler] = {
    ApiError: _answer_error,
    HTTPException: _answer_error,
    ClientDisconnect: _answer_nobody,
    Exception: _answer_error,
}
