"""Image files with more than 8 bits a channel, which Pillow would cut to 8."""

import re
from typing import Any

from PIL import Image

_EIGHT, _SIXTEEN = 8, 16
_WIDE_MODES = {"I;16": "16-bit", "I": "16-bit or 32-bit", "F": "floating-point"}

# How Pillow calls 16 bits a channel in a file; BGR;16 is 16 bits for all three.
_WIDE_LAYOUT = re.compile(r"(?<!BGR);16[BLN]?$")

_TIFF_BITS, _TIFF_FORMATS, _SIGNED = 258, 339, 2
_BC6H = 6  # the one of the compressions of DDS that holds floating-point numbers

# JPEG 2000 (ISO 15444-1, annex A.5.1): the markers SOC and SIZ, and where in SIZ the
# number of components and the first of their depths are, from SOC on.
_CODESTREAM = b"\xff\x4f\xff\x51"
_NUM_COMPONENTS, _COMPONENTS, _COMPONENT_SIZE = 40, 42, 3

# AV1 in ISOBMFF (section 2.3.3): flags of the configuration, after the type of its box.
_AV1_CONFIGURATION, _AV1_FLAGS = b"av1C", 2
_HIGH_BIT_DEPTH, _TWELVE_BIT = 0x40, 0x20


def wide_pixels(image: Image.Image) -> str | None:
    """Return the kind of an image's pixels if they do not fit into 8 bits a channel.

    ``image`` is opened, and nothing of it is decoded. The mode alone does not show it:
    Pillow has none for colours of 16 bits, and keeps their upper 8 bits without a word.
    """
    # The modes I;16B, I;16L and I;16N differ in the order of the bytes.
    kind = _WIDE_MODES.get(image.mode[:4])
    if kind is not None:
        return kind
    if _is_signed(image):
        return "signed"
    num_bits = _bits_of(image)
    return f"{num_bits}-bit" if num_bits > _EIGHT else None


def _bits_of(image: Any) -> int:
    """Return the bits of a channel in an image file; 8 stands for less as well."""
    # What Pillow's decoders are called with: a codec, and what the file holds.
    tiles = [(codec, *_as_tuple(args)) for codec, _, _, args in image.tile]
    texts = [value for tile in tiles for value in tile if isinstance(value, str)]
    if any(map(_WIDE_LAYOUT.search, texts)) or "SGI16" in texts:
        return _SIXTEEN
    match image.format:
        case "TIFF":
            return int(max(image.tag_v2.get(_TIFF_BITS, (1,))))
        case "PPM":
            return max(_largest_value(tile) for tile in tiles).bit_length()
        case "DDS" if any(tile[:2] == ("bcn", _BC6H) for tile in tiles):
            return _SIXTEEN
        case "JPEG2000":
            return _bits_of_jpeg_2000(_content_of(image))
        case "AVIF":
            return _bits_of_avif(_content_of(image))
    return _EIGHT


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return args if isinstance(args, tuple) else (args,)


def _is_signed(image: Any) -> bool:
    is_tiff = image.format == "TIFF"
    return is_tiff and _SIGNED in image.tag_v2.get(_TIFF_FORMATS, ())


def _largest_value(tile: tuple[Any, ...]) -> int:
    """Return the value of white that a file of Netpbm names; 255 where none is kept."""
    codec, *args = tile
    is_scaled = codec in ("ppm", "ppm_plain")
    return max([0, *(arg for arg in args if is_scaled and isinstance(arg, int))])


def _content_of(image: Any) -> bytes:
    place = image.fp.tell()
    image.fp.seek(0)
    content: bytes = image.fp.read()
    image.fp.seek(place)
    return content


def _bits_of_jpeg_2000(content: bytes) -> int:
    size = content[content.find(_CODESTREAM) :]
    count = int.from_bytes(size[_NUM_COMPONENTS:_COMPONENTS], "big")
    end = _COMPONENTS + count * _COMPONENT_SIZE
    # The upper bit is the sign, the others are the depth less one.
    depths = [depth & 0x7F for depth in size[_COMPONENTS:end:_COMPONENT_SIZE]]
    return max(depths, default=_EIGHT - 1) + 1


def _bits_of_avif(content: bytes) -> int:
    meta = _box(content, b"meta")
    _, *parts = meta.split(_AV1_CONFIGURATION)
    flags = [part[_AV1_FLAGS] for part in parts if len(part) > _AV1_FLAGS]
    if not any(flag & _HIGH_BIT_DEPTH for flag in flags):
        return _EIGHT
    return 12 if any(flag & _TWELVE_BIT for flag in flags) else 10


def _box(content: bytes, kind: bytes) -> bytes:
    """Return an outer box of a file of ISO's base media format, as AVIF's are."""
    start = 0
    while start + 8 <= len(content):
        size = int.from_bytes(content[start : start + 4], "big")
        if content[start + 4 : start + 8] == kind:
            return content[start : start + size]
        if size < 8:  # to the end of the file, or of 64 bits: beyond what is sought
            break
        start += size
    return b""
