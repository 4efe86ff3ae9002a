"""Parser of ``multipart/form-data`` (RFC 7578) with files as parts.

Its time is proportional to the length of the body, and it rejects a form that is cut
short. Nothing is written to disk.
"""

import re

from knnper.client.service.errors import RequestError

FORM_FIELD = "image"
_MAX_HEADER_BYTES = 4096  # of a part
_MAX_BOUNDARY_LENGTH = 70
# The next quotation mark ends a quoted value, so that each character is read once.
_PARAMETER = re.compile(
    r';\s*(?P<name>[^\s;="]+)\s*=\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^;"]*))'
)


def split_form(
    content: bytes, boundary: str, max_parts: int
) -> list[tuple[str, bytes]]:
    """Split a form into the media type and content of each part."""
    if not boundary.isascii() or not 1 <= len(boundary) <= _MAX_BOUNDARY_LENGTH:
        raise _malformed(
            f"a boundary of 1 to {_MAX_BOUNDARY_LENGTH} characters in the content type"
        )
    # A line break is put before the first delimiter, as there is before the others.
    pieces = (b"\r\n" + content).split(b"\r\n--" + boundary.encode("ascii"))
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise _malformed("parts, and --boundary-- at the end")
    parts = pieces[1:-1]
    if len(parts) > max_parts:
        raise RequestError(
            422, f"found {len(parts)} parts, expected at most {max_parts}"
        )
    return [_read_part(part) for part in parts]


def media_type_of(header: str) -> tuple[str, str]:
    """Return the media type in a content type, and a form's boundary or ""."""
    media_type, parameters = value_and_parameters(header)
    return media_type.lower(), parameters.get("boundary", "")


def value_and_parameters(header: str) -> tuple[str, dict[str, str]]:
    """Split a header such as ``form-data; name="x"``; the first of equal names counts.

    The functions of the module `email` need quadratic time for this.
    """
    parameters: dict[str, str] = {}
    for match in _PARAMETER.finditer(header):
        quoted, plain = match["quoted"], match["plain"]
        value = plain.strip() if quoted is None else quoted
        parameters.setdefault(match["name"].lower(), value)
    return header.partition(";")[0].strip(), parameters


def _read_part(part: bytes) -> tuple[str, bytes]:
    head, separator, content = part.partition(b"\r\n\r\n")
    if not separator or len(head) > _MAX_HEADER_BYTES:
        raise _malformed("a blank line after the headers of each part")
    headers: dict[str, str] = {}
    for line in head.decode("latin-1").split("\r\n"):
        key, _, value = line.partition(":")
        headers.setdefault(key.strip().lower(), value.strip())
    _, parameters = value_and_parameters(headers.get("content-disposition", ""))
    name = parameters.get("name", "")
    if name != FORM_FIELD:
        raise RequestError(422, f"found a field {name!r}, expected {FORM_FIELD!r} only")
    media_type, _ = media_type_of(headers.get("content-type", ""))
    return media_type, content


def _malformed(expected: str) -> RequestError:
    return RequestError(400, f"the form is malformed: expected {expected}")
