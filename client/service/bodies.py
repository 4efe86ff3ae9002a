"""Bodies of requests, and the limits on what a request may cost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import Message
from typing_extensions import override

from knnper.client.service.errors import RequestError

FORM = "multipart/form-data"
FORM_FIELD = "image"  # the name of every field of a form


@dataclass(frozen=True)
class RequestLimits:
    """What requests may cost; the defaults suit a small machine.

    Attributes
    ----------
    max_request_bytes, max_held_bytes
        Size of one body, and of all bodies that arrive or are worked on.
    max_inputs, max_pixels, max_json_values
        Of one request. Pixels are counted in all images, before they are resized.
    seconds
        In which work has to begin, and a prediction to end.
    num_readers
        Threads that predict; one more changes the store.
    max_waiting
        Requests that wait for a thread, in each of the two queues.
    poll_s
        Interval at which a newer installation is looked for.
    body_bytes_per_s, body_grace_s
        Pace at which a body has to arrive, and how many seconds it may be behind.
    """

    max_request_bytes: int = 16_000_000
    max_held_bytes: int = 256_000_000
    max_inputs: int = 256
    max_pixels: int = 50_000_000
    max_json_values: int = 2_000_000
    seconds: float = 30.0
    num_readers: int = 2
    max_waiting: int = 64
    poll_s: float = 1.0
    body_bytes_per_s: float = 20_000.0
    body_grace_s: float = 10.0


@dataclass(frozen=True)
class Body:
    """A whole body and its media type; of a form, its files instead of the content."""

    media_type: str
    content: bytes = b""
    files: Sequence[UploadFile] = ()


class Bodies:
    """Reads the bodies of requests within the limits of size, memory and pace."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._num_held_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Yield the body of a request; it counts as held until the block ends."""
        limits = self._limits
        began = time.monotonic()
        size = 0

        async def receive() -> Message:
            """Receive a part of the body, within the limits."""
            nonlocal size
            due = began + limits.body_grace_s + size / limits.body_bytes_per_s
            try:
                # A part that has arrived is taken, even if it is late.
                async with asyncio.timeout(max(due - time.monotonic(), 0)):
                    event = await request.receive()
            except TimeoutError as error:
                raise RequestError(
                    408,
                    f"expected at least {limits.body_bytes_per_s:g} bytes of the body "
                    f"a second, after {limits.body_grace_s:g} s",
                ) from error
            num_new = len(event.get("body", b""))
            size += num_new
            self._num_held_bytes += num_new
            self._require_room(size)
            return event

        self._require_room(int(request.headers.get("content-length", 0)))
        media_type = request.headers.get("content-type", "").partition(";")[0]
        media_type = media_type.strip().lower()
        limited = Request(request.scope, receive)
        try:
            if media_type == FORM:
                form = await _read_form(limited, limits.max_inputs)
                try:
                    yield Body(media_type, files=_files_of(form))
                finally:
                    await form.close()
            else:
                yield Body(media_type, await limited.body())
        except ClientDisconnect as error:
            raise RequestError(400, "the body ended early") from error
        finally:
            self._num_held_bytes -= size

    def _require_room(self, size: int) -> None:
        limits = self._limits
        if size > limits.max_request_bytes:
            raise RequestError(
                413,
                f"the body has more than {limits.max_request_bytes} bytes; send fewer "
                "inputs at once, or raise service.max_request_mb",
            )
        if self._num_held_bytes > limits.max_held_bytes:
            raise RequestError(
                503,
                f"{limits.max_held_bytes} bytes of requests are held already; try "
                "again in a moment",
                {"Connection": "close"},
            )


class _FormParser(MultiPartParser):
    """Starlette's parser of forms: all parts are files in memory, up to the end."""

    spool_max_size = 0  # files of any size stay in memory, which `Bodies` limits
    has_ended = False

    @override
    def on_end(self) -> None:
        self.has_ended = True

    @override
    def on_headers_finished(self) -> None:
        part = self._current_part
        if part.content_disposition is not None:
            # Starlette decodes a part without a file name as text.
            part.content_disposition += b'; filename=""'
        super().on_headers_finished()


async def _read_form(request: Request, max_parts: int) -> FormData:
    async def stream() -> AsyncGenerator[bytes, None]:
        async for chunk in request.stream():
            yield chunk
        if not parser.has_ended:  # the parser would leave out the last part
            raise MultiPartException("it is cut short")

    parser = _FormParser(
        request.headers, stream(), max_files=max_parts, max_fields=max_parts
    )
    try:
        return await parser.parse()
    except (MultiPartException, ValueError) as error:  # ValueError of python-multipart
        raise RequestError(
            400,
            f"the form is malformed ({error}): expected parts, each of headers, a "
            "blank line and a file, and --boundary-- at the end",
        ) from error


def _files_of(form: FormData) -> list[UploadFile]:
    """Return the files of a form; refuse a form with other fields."""
    files = []
    for name, file in form.multi_items():
        if name != FORM_FIELD or isinstance(file, str):
            raise RequestError(
                422, f"found a field {name!r}, expected {FORM_FIELD!r} only"
            )
        files.append(file)
    return files


class Budget:
    """The time and the pixels that one request may still use."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits, self._num_pixels_left = limits, limits.max_pixels
        self._end = time.monotonic() + limits.seconds

    @property
    def seconds(self) -> float:
        """Seconds until the request has to be answered."""
        return self._end - time.monotonic()

    def take_pixels(self, width: int, height: int, passes: int) -> None:
        """Count the pixels of an image; refuse it before it is decoded if too many."""
        self._num_pixels_left -= width * height * passes
        if self._num_pixels_left < 0:
            times = f", decoded {passes} times" if passes > 1 else ""
            raise RequestError(
                413,
                f"found an image of {width}x{height} pixels{times}, expected at most "
                f"{self._limits.max_pixels} pixels in all images of a request; make "
                "them smaller, send fewer at once, or raise service.max_megapixels",
            )
        if self.seconds < 0:
            raise RequestError(
                503, f"the images were not decoded in {self._limits.seconds:g} s"
            )
