"""What can be wrong with a request, as the status codes and bodies of HTTP."""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from datastore.errors import StoreBusyError, StoreError, StoreFullError
from knnper.config.errors import DataError, KnnPerError

STATUSES: Mapping[int, tuple[str, str]] = {
    400: ("malformed", "The body is not what its content type says."),
    401: ("unauthorized", "The token is missing or wrong."),
    403: (
        "forbidden",
        "The token lacks a scope. Where none is needed: only programs and pages of "
        "this machine are answered.",
    ),
    404: ("not_found", "There is nothing here."),
    405: ("method_not_allowed", "The method is not known here."),
    408: ("timeout", "The body arrives too slowly."),
    409: ("conflict", "A name is taken, or the store cannot do this."),
    413: ("too_large", "The request is more than the service takes at once."),
    415: (
        "unsupported_media_type",
        "The content type is not one of those that are taken here.",
    ),
    422: ("invalid", "An input, a label or a name is not as described."),
    500: ("internal", "Something went wrong that should not."),
    503: ("unavailable", "No model is installed yet, or there is too much to do."),
    507: ("full", "What was sent fits neither the store's capacity nor the disk."),
}
_HEADERS = {
    401: {"WWW-Authenticate": 'Bearer realm="knnper"'},
    # The rest of the body is not read.
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    503: {"Retry-After": "1"},
}


class ErrorDocument(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="forbid")

    error: str = Field(description="A short name of the kind of error.")
    message: str = Field(
        description="What was found, what was expected, how to mend it."
    )


class RequestError(KnnPerError):
    """A request cannot be answered: a status of `STATUSES`, and what is wrong."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


def answer(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an answer that says what is wrong."""
    name, _ = STATUSES.get(status, STATUSES[400 if status < 500 else 500])
    document = ErrorDocument(error=name, message=message).model_dump()
    return JSONResponse(
        document, status, {**_HEADERS.get(status, {}), **(headers or {})}
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what the OpenAPI document says of these statuses."""
    return {
        status: {"model": ErrorDocument, "description": STATUSES[status][1]}
        for status in statuses
    }


async def answer_known(_: Request, error: Exception) -> JSONResponse:
    """Answer an error of the request, the store or the model."""
    assert isinstance(error, KnnPerError), "as it is registered"
    if isinstance(error, RequestError):
        return answer(error.status, str(error), error.headers)
    return answer(_status_of(error), str(error))


async def answer_invalid(_: Request, error: Exception) -> JSONResponse:
    """Answer a path with a variable part that is not as described."""
    assert isinstance(error, RequestValidationError), "as it is registered"
    first = error.errors()[0]
    return answer(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


async def answer_unknown(_: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    """Answer what nobody thought of; the server logs it."""
    return answer(500, "something went wrong that should not; the log says what")


def _status_of(error: KnnPerError) -> int:
    if isinstance(error, DataError):
        return 422
    if isinstance(error, StoreFullError):
        return 507
    if isinstance(error, StoreBusyError) or not isinstance(error, StoreError):
        return 503
    return 409
