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
    file: Any = image
    tags = file.tag_v2 if image.format == "TIFF" else {}
    if _SIGNED in tags.get(_TIFF_FORMATS, ()):
        return "signed"
    # The arguments of Pillow's decoders: the codec and the layout of the pixels.
    tiles = [
        (codec, *(args if isinstance(args, tuple) else (args,)))
        for codec, _, _, args in file.tile
    ]
    if any(_WIDE_LAYOUT.search(str(value)) for tile in tiles for value in tile):
        return "16-bit"
    num_bits = max(tags.get(_TIFF_BITS, (8,)))
    if image.format == "PPM":
        # These codecs have the value of white among their arguments.
        scaled = [args for codec, *args in tiles if codec in ("ppm", "ppm_plain")]
        whites = [value for args in scaled for value in args if isinstance(value, int)]
        num_bits = max(whites, default=0).bit_length()
    return f"{num_bits}-bit" if num_bits > 8 else None
