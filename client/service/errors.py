"""Error answers of the service: statuses, their documents, and which error is which."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from knnper.datastore.examples import StoreBusyError, StoreError, StoreFullError
from knnper.errors import DataError, KnnPerError

# By status: the name of the kind of error, and its description in the OpenAPI document.
STATUSES: Mapping[int, tuple[str, str]] = {
    400: ("malformed", "The body is not of its content type."),
    401: ("unauthorized", "The token is missing or wrong."),
    403: ("forbidden", "The token lacks a scope, or another machine has none."),
    404: ("not_found", "The path or the example does not exist."),
    405: ("method_not_allowed", "The path does not have this method."),
    408: ("timeout", "The body arrives too slowly."),
    409: ("conflict", "A name is taken, or the store cannot do this."),
    413: ("too_large", "The request exceeds a limit of the service."),
    415: ("unsupported_media_type", "The path does not take this content type."),
    422: ("invalid", "An input, a label or a name is not as described."),
    431: ("header_too_large", "The header exceeds a limit of the service."),
    500: ("internal", "The service failed; its log has the reason."),
    503: ("unavailable", "No model is installed yet, or the service is too busy."),
    507: ("full", "The examples fit neither the store's capacity nor the disk."),
}
_HEADERS = {
    401: {"WWW-Authenticate": 'Bearer realm="knnper"'},
    # The rest of the body is not read.
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    431: {"Connection": "close"},
    503: {"Retry-After": "1"},
}
# The first class that fits an error decides its status.
_STATUS_OF: tuple[tuple[type[Exception], int], ...] = (
    (DataError, 422),
    (StoreFullError, 507),
    (StoreBusyError, 503),
    (StoreError, 409),
    (KnnPerError, 503),
)


class ErrorDocument(BaseModel):
    """An error."""

    model_config = ConfigDict(extra="forbid")

    error: str = Field(description="A short name of the kind of error.")
    message: str = Field(
        description="The value or state found, the one expected, and how to fix it."
    )


class RequestError(KnnPerError):
    """A request is refused with a status of `STATUSES` and a message."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Build the response of an error."""
    name, _ = STATUSES.get(status, STATUSES[400 if status < 500 else 500])
    document = ErrorDocument(error=name, message=message).model_dump()
    return JSONResponse(
        document, status, {**_HEADERS.get(status, {}), **(headers or {})}
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe error statuses for the OpenAPI document."""
    return {
        status: {"model": ErrorDocument, "description": STATUSES[status][1]}
        for status in statuses
    }


async def handle_error(_: Request, error: Exception) -> JSONResponse:
    """Answer an exception; the server logs those that are not expected."""
    if isinstance(error, RequestError):
        return error_response(error.status, str(error), error.headers)
    if isinstance(error, RequestValidationError):  # of a path's variable part
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return error_response(422, f"{place}: {first['msg']}")
    for kind, status in _STATUS_OF:
        if isinstance(error, kind):
            return error_response(status, str(error))
    return error_response(500, "the service failed; its log has the reason")
