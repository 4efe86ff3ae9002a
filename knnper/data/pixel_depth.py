"""Detect images with more than 8 bits per channel, which Pillow reduces to 8."""

import re
from typing import Any

from PIL import Image

_WIDE_MODES = {"I;16": "16-bit", "I": "16-bit or 32-bit", "F": "floating-point"}

# Pillow's name of 16 bits per channel in a file; BGR;16 is 16 bits for all channels.
_WIDE_LAYOUT = re.compile(r"(?<!BGR);16[BLN]?$|^SGI16$")

_TIFF_BITS, _TIFF_FORMATS = 258, 339  # tags
_SIGNED = 2  # value of the tag of formats


def wide_pixels(image: Image.Image) -> str | None:
    """Describe the pixels of an image with more than 8 bits per channel, else None.

    ``image`` is opened but not decoded. Its mode is not enough: Pillow has no mode for
    colours of 16 bits and silently keeps their upper 8 bits. Checked are PNG, TIFF, PPM
    and SGI files.
    """
    # The modes I;16B, I;16L and I;16N differ in byte order.
    kind = _WIDE_MODES.get(image.mode[:4])
    if kind is not None:
        return kind
    if _is_signed(image):
        return "signed"
    num_bits = _bits_of(image)
    return f"{num_bits}-bit" if num_bits > 8 else None


def _bits_of(image: Any) -> int:
    """Return the bits per channel of an image file; 8 stands for fewer, too."""
    # The arguments of Pillow's decoders: the codec and the layout of the pixels.
    tiles = [(codec, *_as_tuple(args)) for codec, _, _, args in image.tile]
    if any(_WIDE_LAYOUT.search(str(value)) for tile in tiles for value in tile):
        return 16
    match image.format:
        case "TIFF":
            return int(max(image.tag_v2.get(_TIFF_BITS, (1,))))
        case "PPM":
            return max(_white_of_netpbm(tile) for tile in tiles).bit_length()
    return 8


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return args if isinstance(args, tuple) else (args,)


def _is_signed(image: Any) -> bool:
    is_tiff = image.format == "TIFF"
    return is_tiff and _SIGNED in image.tag_v2.get(_TIFF_FORMATS, ())


def _white_of_netpbm(tile: tuple[Any, ...]) -> int:
    """Return the value of white in a Netpbm file; 0 if the file does not state it."""
    codec, *args = tile
    is_scaled = codec in ("ppm", "ppm_plain")
    return max([0, *(arg for arg in args if is_scaled and isinstance(arg, int))])
