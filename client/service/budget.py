"""How much one request may cost, and all of them together."""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from email.message import Message

from fastapi import Request

from client.service.errors import RequestError
from knnper.transport.sockets import SocketLimits, read_pieces


@dataclass(frozen=True)
class Limits:
    """What requests may cost; each has a default that suits a small machine.

    Attributes
    ----------
    max_request_bytes
        Of a request's body.
    max_held_bytes
        Of all bodies that arrive, wait or are worked on at a time.
    max_inputs
        Of one request: to predict, or to store.
    max_pixels
        Of all images of a request as they are sent, before they are resized.
    max_json_values
        Of one body: numbers, texts, lists and objects.
    seconds
        In which work has to begin, and a prediction to end.
    num_readers
        Threads that predict. One more writes.
    max_waiting
        Requests that wait for a thread, in each of the two queues.
    poll_s
        Between looks at whether a newer model is installed.
    sockets
        Of connections, and the pace of bodies.
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
    sockets: SocketLimits = field(default_factory=SocketLimits)


@dataclass(frozen=True)
class Body:
    """What was sent: all of it, its type without parameters, the boundary of a form."""

    content: bytes
    media_type: str
    boundary: str = ""


class Bodies:
    """Reads requests' bodies, no more of them than is allowed."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._held = limits, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Give what a request sends, to be held until its answer is known.

        It is refused, as soon as that is known, where it is too large (413), comes too
        slowly (408), or too many others are held (503).
        """
        self._require_size(int(request.headers.get("content-length", 0)))
        chunks, size = list[bytes](), 0
        try:
            async for chunk in read_pieces(request.receive, self._limits.sockets):
                size += len(chunk)
                self._held += len(chunk)
                self._require_size(size)
                chunks.append(chunk)
            yield Body(b"".join(chunks), *_content_type(request))
        except TimeoutError as error:
            pace = self._limits.sockets
            raise RequestError(
                408,
                f"expected at least {pace.body_bytes_per_s:g} bytes of the body a "
                f"second, after {pace.body_grace_s:g} s",
            ) from error
        except ConnectionError as error:
            raise RequestError(400, "the body ended early") from error
        finally:
            self._held -= size

    def _require_size(self, size: int) -> None:
        limits = self._limits
        if size > limits.max_request_bytes:
            raise RequestError(
                413,
                f"the body has more than {limits.max_request_bytes} bytes; send fewer "
                "inputs at once, or raise service.max_request_mb",
            )
        if self._held > limits.max_held_bytes:
            raise RequestError(
                503,
                f"{limits.max_held_bytes} bytes of requests are held already; try "
                "again in a moment",
                {"Connection": "close"},
            )


def _content_type(request: Request) -> tuple[str, str]:
    """Return the media type and the boundary, empty if there is none."""
    header, message = request.headers.get("content-type", ""), Message()
    message["content-type"] = header
    boundary = message.get_param("boundary", "")
    media_type = message.get_content_type() if "/" in header else header
    return media_type.lower(), boundary if isinstance(boundary, str) else ""


class Budget:
    """What is left of what one request may cost once it is there."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._pixels = limits, limits.max_pixels
        self._end = time.monotonic() + limits.seconds

    @property
    def seconds(self) -> float:
        """That are left."""
        return self._end - time.monotonic()

    def take_pixels(self, width: int, height: int, passes: int) -> None:
        """Refuse an image, before it is decoded, for which too little is left."""
        self._pixels -= width * height * passes
        if self._pixels < 0:
            often = f", decoded {passes} times" if passes > 1 else ""
            raise RequestError(
                413,
                f"found an image of {width}x{height} pixels{often}, expected at most "
                f"{self._limits.max_pixels} pixels in all images of a request; make "
                "them smaller, send fewer at once, or raise service.max_megapixels",
            )
        if self.seconds < 0:
            raise RequestError(
                503, f"the images were not decoded in {self._limits.seconds:g} s"
            )
