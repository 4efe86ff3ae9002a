"""A request's body, no more of it than is allowed, and what it claims to be."""

import asyncio
from dataclasses import dataclass
from email.message import Message

from starlette.requests import ClientDisconnect, Request

from client.service.limits import Limits
from client.service.problems import RequestError


@dataclass(frozen=True)
class Body:
    """What was sent.

    Attributes
    ----------
    content
        All of it.
    media_type
        In lower case, without parameters, as in ``image/png``.
    boundary
        Between the parts of ``multipart/form-data``; else empty.
    """

    content: bytes
    media_type: str
    boundary: str = ""


async def read_body(request: Request, limits: Limits) -> Body:
    """Return what a request sends.

    Raises
    ------
    RequestError
        413 if it is too large, as soon as that is known; 408 if it takes too long;
        400 if the sender goes away.
    """
    _refuse_large(int(request.headers.get("content-length", 0)), limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            content = await _read(request, limits)
    except TimeoutError as error:
        raise RequestError(
            408, f"expected the whole body within {limits.body_timeout_s:g} s"
        ) from error
    except ClientDisconnect as error:
        raise RequestError(400, "the body ended early") from error
    media_type, boundary = parse_content_type(request.headers.get("content-type", ""))
    return Body(content, media_type, boundary)


def parse_content_type(header: str) -> tuple[str, str]:
    """Return the media type and the boundary, empty if there is none."""
    message = Message()
    message["content-type"] = header
    boundary = message.get_param("boundary", "")
    media_type = message.get_content_type() if "/" in header else header
    return media_type.lower(), boundary if isinstance(boundary, str) else ""


def unsupported(found: str, *expected: str) -> RequestError:
    """Return the answer to a body of a type that is not taken."""
    names = ", ".join(expected)
    return RequestError(415, f"found content type {found!r}, expected one of {names}")


async def _read(request: Request, limits: Limits) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        _refuse_large(size, limits)
        chunks.append(chunk)
    return b"".join(chunks)


def _refuse_large(size: int, limits: Limits) -> None:
    if size > limits.max_request_bytes:
        raise RequestError(
            413,
            f"the body has more than {limits.max_request_bytes} bytes; send fewer "
            "inputs at once, or raise service.max_request_mb",
        )
