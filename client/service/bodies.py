"""Bodies of requests, and the limits on what a request may cost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import Request

from knnper.client.service.errors import RequestError
from knnper.client.service.forms import media_type_of


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
    """A whole body, its media type, and the boundary if it is a form."""

    content: bytes
    media_type: str
    boundary: str = ""


class Bodies:
    """Reads the bodies of requests within the limits of size, memory and pace."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits, self._num_held_bytes = limits, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Yield the body of a request; it counts as held until the block ends."""
        limits = self._limits
        self._require_room(int(request.headers.get("content-length", 0)))
        chunks, size = list[bytes](), 0
        began, is_complete = time.monotonic(), False
        try:
            while not is_complete:
                due = began + limits.body_grace_s + size / limits.body_bytes_per_s
                # A chunk that has arrived is taken, even if it is late.
                async with asyncio.timeout(max(due - time.monotonic(), 0)):
                    event = await request.receive()
                if event["type"] == "http.disconnect":
                    raise RequestError(400, "the body ended early")
                chunk: bytes = event.get("body", b"")
                size += len(chunk)
                self._num_held_bytes += len(chunk)
                self._require_room(size)
                chunks.append(chunk)
                is_complete = not event.get("more_body", False)
            media_type, boundary = media_type_of(
                request.headers.get("content-type", "")
            )
            yield Body(b"".join(chunks), media_type, boundary)
        except TimeoutError as error:
            raise RequestError(
                408,
                f"expected at least {limits.body_bytes_per_s:g} bytes of the body a "
                f"second, after {limits.body_grace_s:g} s",
            ) from error
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
