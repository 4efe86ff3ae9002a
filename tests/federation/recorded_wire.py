"""What clients send, byte for byte, and what of it gives their data away."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

VALUES_AT_ONCE = {"uint8": 32, "float32": 8, "float64": 8}
"""Values on end that are looked for."""

LESSER_BITS = {"uint8": 0, "float32": 12, "float64": 41}
"""Bits of a value that are not compared."""

FEWEST_DISTINCT = 4
"""Fewer occur by chance, as a row of equal pixels or of zeros does."""

_LOCALHOST = "127.0.0.1"


class Recorder:
    """Passes connections on to a server, and keeps what clients send."""

    def __init__(self, port: int) -> None:
        self._server = (_LOCALHOST, port)
        self._listening = socket.create_server((_LOCALHOST, 0))
        self._open: list[socket.socket] = []
        self._sent: list[bytearray] = []

    @property
    def address(self) -> str:
        return f"{_LOCALHOST}:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Self:
        _in_background(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def bodies(self) -> list[bytes]:
        """Return the bodies of all requests that were sent so far."""
        return [body for sent in list(self._sent) for body in _bodies(bytes(sent))]

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(self._server)
            self._open += [client, server]
            sent = bytearray()
            self._sent.append(sent)
            _in_background(_pass_on, client, server, sent)
            _in_background(_pass_on, server, client, bytearray())


class Secret:
    """Values that may not be sent, and parts of them.

    Numbers of a type are compared by their leading bits, since the last ones of an
    embedding depend on what it is computed together with.

    Parameters
    ----------
    values
        One row each, shape (n, ...), all of the type in which they are looked for.
    """

    def __init__(self, values: NDArray[np.generic]) -> None:
        self._type = values.dtype
        self._width = VALUES_AT_ONCE[values.dtype.name]
        rows = _leading_bits(values).reshape(len(values), -1)
        self._wanted = {
            row[start : start + self._width].tobytes()
            for row in rows
            # Whoever sends two of these parts on end sends one as a whole.
            for start in range(0, rows.shape[1] - self._width + 1, self._width)
            if len(set(row[start : start + self._width])) >= FEWEST_DISTINCT
        }

    def __len__(self) -> int:
        return len(self._wanted)

    def found_in(self, bodies: Iterable[bytes]) -> int:
        """Return how many parts the bodies hold, wherever they begin."""
        return len({part for body in bodies for part in self._parts_of(body)})

    def _parts_of(self, body: bytes) -> set[bytes]:
        size = self._type.itemsize
        return {
            part
            for offset in range(size)
            if (num_values := (len(body) - offset) // size) >= self._width
            for part in self._parts_from(body, offset, num_values)
        }

    def _parts_from(self, body: bytes, offset: int, num_values: int) -> set[bytes]:
        values = np.frombuffer(body, self._type, num_values, offset)
        bits = _leading_bits(values).tobytes()
        length = 4 * self._width
        starts = range(0, len(bits) - length + 1, 4)
        return self._wanted.intersection(
            bits[start : start + length] for start in starts
        )


def _leading_bits(values: NDArray[np.generic]) -> NDArray[np.uint32]:
    """Return sign, exponent and 11 bits of the mantissa; a byte as it is."""
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    return (bits >> LESSER_BITS[values.dtype.name]).astype(np.uint32)


def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            kept += part
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)


def _in_background(work: object, *arguments: object) -> None:
    threading.Thread(target=_quietly, args=(work, *arguments), daemon=True).start()


def _quietly(work: object, *arguments: object) -> None:
    with contextlib.suppress(OSError):  # closed at the end
        work(*arguments)  # type: ignore[operator]


def _bodies(sent: bytes) -> Iterator[bytes]:
    """Yield the bodies of the requests of one connection; none may be disguised."""
    while b"\r\n\r\n" in sent:
        head, _, sent = sent.partition(b"\r\n\r\n")
        assert not re.search(rb"(?im)^(transfer|content)-encoding:", head), head
        length = re.search(rb"(?im)^content-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        yield sent[:size]
        sent = sent[size:]
    assert not sent, "more than requests was sent"
