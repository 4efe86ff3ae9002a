"""Image files with 16 bits a channel, and others that Pillow opens as 8 bits."""

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 4
GREY, COLOUR, GREY_AND_ALPHA, COLOUR_AND_ALPHA = 0, 2, 4, 6  # of PNG
_CHANNELS = {GREY: 1, COLOUR: 3, GREY_AND_ALPHA: 2, COLOUR_AND_ALPHA: 4}


def values(channels: int, largest: int = 4095) -> NDArray[np.uint16]:
    """Return pixels, shape (4, 4, channels), as scanners of 12 bits make them."""
    generator = np.random.default_rng(0)
    shape = (SIDE, SIDE, channels)
    return generator.integers(0, largest + 1, shape, dtype=np.uint16)


def png16(colour: int) -> bytes:
    """Return a PNG file of 16 bits a channel."""
    rows = values(_CHANNELS[colour]).astype(">u2")
    content = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 16, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(content)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def tiff(
    pixels: NDArray[Any],
    *,
    photometric: int,
    sample_format: int = 1,
    planes: bool = False,
) -> bytes:
    """Return an uncompressed TIFF file; ``planes`` puts one channel after the other."""
    height, width, channels = pixels.shape
    data = (np.moveaxis(pixels, -1, 0) if planes else pixels).tobytes()
    # A field of channels values of 16 bits; the data follows the fields.
    fields: list[tuple[int, int, list[int]]] = [
        (256, 4, [width]),
        (257, 4, [height]),
        (258, 3, [8 * pixels.itemsize] * channels),
        (259, 3, [1]),
        (262, 3, [photometric]),
        (
            273,
            4,
            [len(data) // channels * at for at in range(channels if planes else 1)],
        ),
        (277, 3, [channels]),
        (278, 4, [height]),
        (279, 4, [len(data) // channels] * channels if planes else [len(data)]),
        (284, 3, [2 if planes else 1]),
        (339, 3, [sample_format] * channels),
    ]
    start = 8 + 2 + 12 * len(fields) + 4
    extra, entries = b"", b""
    sizes = {3: ("<H", 2), 4: ("<I", 4)}
    data_at = start + sum(
        sizes[kind][1] * len(found)
        for _, kind, found in fields
        if sizes[kind][1] * len(found) > 4
    )
    for tag, kind, found in fields:
        numbers = [number + data_at for number in found] if tag == 273 else found
        packed = b"".join(struct.pack(sizes[kind][0], number) for number in numbers)
        if len(packed) > 4:
            place = struct.pack("<I", start + len(extra))
            extra += packed
        else:
            place = packed.ljust(4, b"\0")
        entries += struct.pack("<HHI", tag, kind, len(numbers)) + place
    head = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(fields))
    return head + entries + struct.pack("<I", 0) + extra + data


def netpbm(kind: str, largest: int) -> bytes:
    """Return a PPM (``P6``) or plain PPM (``P3``) file."""
    pixels = values(3, largest)
    head = f"{kind} {SIDE} {SIDE} {largest}\n".encode()
    if kind == "P3":
        return head + b" ".join(
            str(value).encode() for value in pixels.ravel().tolist()
        )
    return head + pixels.astype(">u2" if largest > 255 else ">u1").tobytes()


def sgi(num_bytes: int) -> bytes:
    """Return an SGI file of one or two bytes a channel."""
    head = struct.pack(">hBBHHHH", 474, 0, num_bytes, 3, SIDE, SIDE, 3).ljust(
        512, b"\0"
    )
    pixels = values(3, 255 if num_bytes == 1 else 4095)
    return head + np.moveaxis(pixels, -1, 0).astype(f">u{num_bytes}").tobytes()
