"""JSON that is read from its beginning to its end, a value at a time."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from knnper.config.errors import DataError

_LEAST_CHUNK = 1 << 22
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^ \t\r\n,\]}]*")
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
# What is open is closed by its own kind of bracket, so that only this kind is counted.
# A quote is matched alone where the text that begins there is not all in memory.
_TOKENS: Mapping[bytes, re.Pattern[bytes]] = MappingProxyType(
    {
        b"{": re.compile(_STRING + rb'|\{|\}|"', re.DOTALL),
        b"[": re.compile(_STRING + rb'|\[|\]|"', re.DOTALL),
        b'"': re.compile(_STRING + rb'|"', re.DOTALL),
    }
)
_DEPTHS: Mapping[bytes, int] = MappingProxyType({b"{": 1, b"[": 1, b"}": -1, b"]": -1})


class JsonStream:
    """One JSON text in a file, of which only the value at hand is in memory.

    Where values end is found by counting brackets outside of texts; whether they are
    valid is for those to say who parse them.

    Parameters
    ----------
    file
        UTF-8, at its beginning, where a byte order mark is passed over.
    path
        Its name in messages.

    Notes
    -----
    All methods raise `DataError` where the file ends too early, or something else
    than what is asked for comes next.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._held = b""
        self._at = 0
        self._held_from = 0
        self._read_on()
        if self._held.startswith(_BYTE_ORDER_MARK):
            self._at = len(_BYTE_ORDER_MARK)

    def members(self) -> Iterator[str]:
        """Yield the names in the object that comes next.

        The caller reads the value of each before it asks for the next name.
        """
        self._expect(b"{")
        if self._skip(b"}"):
            return
        while True:
            name = self._name()
            self._expect(b":")
            yield name
            if not self._skip(b","):
                break
        self._expect(b"}")

    def value(self) -> bytes:
        """Return the value that comes next, as it stands in the file."""
        first = self._peek()
        tokens = _TOKENS.get(first)
        end = self._end_of_scalar() if tokens is None else self._end_by(tokens)
        return self._take(end)

    def flat_object(self) -> bytes:
        """Return the object that comes next, which may not hold other objects.

        Several times as fast as `value`, since only quotes are looked at.
        """
        if self._peek() != b"{":
            raise self._unexpected("an object")
        length, in_text = 0, False
        while True:
            end = self._held.find(b"}", self._at + length) + 1
            if end > 0:
                in_text ^= _begins_or_ends_text(self._held[self._at + length : end])
                length = end - self._at
                if not in_text:
                    return self._take(length)
            elif not self._read_on():
                raise self._wrong(self._position(), f"{self._shown()} has no end")

    def parsed(self) -> Any:
        """Return the value that comes next as Python objects."""
        began = self._position()
        try:
            return json.loads(self.value())
        except (ValueError, RecursionError) as error:
            raise self._wrong(began, f"this is no JSON ({error})") from error

    def require_end(self) -> None:
        """Refuse a file that goes on."""
        if self._peek():
            raise self._unexpected("the end of the file")

    def _name(self) -> str:
        if self._peek() != b'"':
            raise self._unexpected("a name in double quotes")
        return str(self.parsed())

    def _expect(self, byte: bytes) -> None:
        if not self._skip(byte):
            raise self._unexpected(repr(byte.decode()))

    def _skip(self, byte: bytes) -> bool:
        """Step over ``byte`` if it comes next."""
        if self._peek() != byte:
            return False
        self._at += 1
        return True

    def _peek(self) -> bytes:
        """Return the next byte that is no white space; none at the end."""
        while True:
            self._at = _matched(_SPACE, self._held, self._at)
            if self._at < len(self._held) or not self._read_on():
                return self._held[self._at : self._at + 1]

    def _end_by(self, tokens: re.Pattern[bytes]) -> int:
        """Return the length of the text, list or object that comes next."""
        depth = length = 0
        while True:
            for token in tokens.finditer(self._held, self._at + length):
                found = token[0]
                if found == b'"':
                    break
                length = token.end() - self._at
                depth += _DEPTHS.get(found, 0)
                if depth == 0:
                    return length
            else:
                length = len(self._held) - self._at
            if not self._read_on():
                raise self._wrong(self._position(), f"{self._shown()} has no end")

    def _end_of_scalar(self) -> int:
        while True:
            end = _matched(_SCALAR, self._held, self._at)
            if end < len(self._held) or not self._read_on():
                return end - self._at

    def _take(self, length: int) -> bytes:
        taken = self._held[self._at : self._at + length]
        self._at += length
        return taken

    def _read_on(self) -> bool:
        """Hold more of the file; return whether there was any."""
        rest = self._held[self._at :]
        # As much again as there is, so that a long value is not searched many times.
        more = self._file.read(max(_LEAST_CHUNK, len(rest)))
        self._held_from += self._at
        self._held, self._at = rest + more, 0
        return bool(more)

    def _position(self) -> int:
        self._peek()
        return self._held_from + self._at

    def _unexpected(self, expected: str) -> DataError:
        what = self._shown() if self._peek() else "the end of the file"
        return self._wrong(self._position(), f"expected {expected}, found {what}")

    def _shown(self) -> str:
        return repr(self._held[self._at : self._at + 20].decode("utf-8", "replace"))

    def _wrong(self, position: int, message: str) -> DataError:
        return DataError(
            f"{self._path} cannot be read as JSON: at byte {position} {message}; if "
            "the file is cut off or damaged, make it again"
        )


def _begins_or_ends_text(part: bytes) -> bool:
    """Return whether the number of quotes that are no characters of texts is odd."""
    if b"\\" in part:
        part = part.replace(rb"\\", b"").replace(rb"\"", b"")
    return part.count(b'"') % 2 == 1


def _matched(pattern: re.Pattern[bytes], held: bytes, start: int) -> int:
    """Return where a pattern that always matches ends."""
    found = pattern.match(held, start)
    return start if found is None else found.end()
