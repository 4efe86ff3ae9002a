"""What can be wrong with a request, as the status codes and bodies of HTTP."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from datastore.errors import StoreBusyError, StoreError, StoreFullError
from knnper.config.errors import DataError, KnnPerError

ERROR_NAMES = {
    400: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid",
    500: "internal",
    503: "unavailable",
    507: "full",
}
_MEANINGS = {
    400: "The body is not what its content type says.",
    401: "The token is missing or wrong.",
    403: "Without a token, only programs and pages of this machine are answered.",
    404: "There is nothing here.",
    405: "The method is not known here.",
    408: "The body did not arrive in time.",
    409: "A name is taken, or the store cannot do this.",
    413: "The body is larger than the service takes.",
    415: "The content type is not one of those that are taken here.",
    422: "An input, a label or a name is not as described.",
    503: "No model is installed yet, or too many requests wait.",
    507: "What was sent fits neither the store's capacity nor the disk.",
}
RETRY_AFTER_S = 1
_EXTRA_HEADERS = {
    401: {"WWW-Authenticate": 'Bearer realm="knnper"'},
    # The rest of the body is not read.
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    503: {"Retry-After": str(RETRY_AFTER_S)},
}


class ErrorDocument(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="forbid")

    error: str = Field(description="A short name of the kind of error.")
    message: str = Field(
        description="What was found, what was expected, how to mend it."
    )


class RequestError(KnnPerError):
    """A request cannot be answered.

    Parameters
    ----------
    status
        A status code of `ERROR_NAMES`.
    message
        What was found, what was expected, how to mend it.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def as_request_error(error: KnnPerError) -> RequestError:
    """Return how an error of the store or of the model is answered."""
    if isinstance(error, RequestError):
        return error
    return RequestError(_status_of(error), str(error))


def _status_of(error: KnnPerError) -> int:
    if isinstance(error, DataError):
        return 422
    if isinstance(error, StoreFullError):
        return 507
    if isinstance(error, StoreBusyError) or not isinstance(error, StoreError):
        return 503
    return 409


def error_document(status: int, message: str) -> ErrorDocument:
    """Return the body of an answer with this status."""
    name = ERROR_NAMES.get(status, ERROR_NAMES[400 if status < 500 else 500])
    return ErrorDocument(error=name, message=message)


def error_headers(status: int) -> dict[str, str]:
    """Return the headers that an answer with this status has beside others."""
    return dict(_EXTRA_HEADERS.get(status, {}))


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what the OpenAPI document says of these statuses."""
    return {
        status: {"model": ErrorDocument, "description": _MEANINGS[status]}
        for status in statuses
    }
