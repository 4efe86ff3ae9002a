"""The parts of ``multipart/form-data`` (RFC 7578) in a body that is in memory."""

from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP

from client.service.problems import RequestError

_MAX_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Part:
    """One field of a form.

    Attributes
    ----------
    name
        Of the field.
    media_type
        As it claims to be; ``text/plain`` where it says nothing.
    content
        Its bytes.
    """

    name: str
    media_type: str
    content: bytes


def split_parts(content: bytes, boundary: str, max_parts: int) -> list[Part]:
    """Return the parts in order.

    Raises
    ------
    RequestError
        400 if the body is no form; 422 if it has more than ``max_parts``.
    """
    if not boundary.isascii() or not 1 <= len(boundary) <= 70:
        raise _malformed("a boundary of 1 to 70 characters in the content type")
    # The first delimiter has no line before it.
    pieces = (b"\r\n" + content).split(b"\r\n--" + boundary.encode("ascii"))
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise _malformed("parts, and --boundary-- at the end")
    parts = pieces[1:-1]
    if len(parts) > max_parts:
        raise RequestError(
            422, f"found {len(parts)} parts, expected at most {max_parts}"
        )
    return [_part(piece) for piece in parts]


def _part(piece: bytes) -> Part:
    head, separator, content = piece.partition(b"\r\n\r\n")
    if not separator or len(head) > _MAX_HEADER_BYTES:
        raise _malformed("a blank line after the headers of each part")
    headers: Message = BytesParser(policy=HTTP.clone(raise_on_defect=False)).parsebytes(
        head.lstrip(b"\r\n") + b"\r\n\r\n", headersonly=True
    )
    name = headers.get_param("name", "", "content-disposition")
    return Part(
        name if isinstance(name, str) else "",
        headers.get_content_type().lower(),
        content,
    )


def _malformed(expected: str) -> RequestError:
    return RequestError(400, f"the form is malformed: expected {expected}")
