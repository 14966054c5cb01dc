"""Answers other than 200, in the form of OpenAI's API: {"error": {message, type, param, code}}."""

from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from sbkit.base.errors import SbkitError

CLIENT_GONE = 499  # nobody reads it; metrics count it, as nginx's do
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
        kind = "rate_limit_error" if self.status == HTTPStatus.TOO_MANY_REQUESTS else kind
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def too_large(most: str) -> ApiError:
    """Return the error over a file with more than so many bytes or seconds."""
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"`file` must have at most {most}, but has more. Send it in parts.",
        param="file",
    )


def as_api_error(error: Exception) -> ApiError:
    """Take an error of ours, of Starlette's (404, a broken form), or a fault of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(
            error.status_code,
            f"A request must be one of this API, but is not ({error.detail}). Correct it.",
        )
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "A request must have an answer, but the server failed over this one. Its log says why.",
    )


def _answer(_: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    found = as_api_error(error)
    return JSONResponse(found.plain(), found.status, headers=found.headers)


HANDLERS: Mapping[type[Exception], ExceptionHandler] = dict.fromkeys(
    (ApiError, HTTPException, ClientDisconnect, Exception), _answer
)
