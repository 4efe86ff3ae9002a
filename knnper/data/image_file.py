"""One image file as pixels."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from knnper.config.errors import DataError

_MODES = {1: "L", 3: "RGB"}
_WIDE_PIXELS = {"I;16": "16-bit", "I": "16-bit or 32-bit", "F": "floating-point"}

DECODER = f"2, Pillow {PIL.__version__}"
"""What `read_image` makes of a file may be another with another one of these."""


def read_image(
    path: str | Path, channels: int, size: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """Return one image, uint8 of shape (height, width, channels).

    Parameters
    ----------
    path
        Of a file in any format that Pillow reads.
    channels
        3 for colour, 1 for grey; others are converted.
    size
        Height and width that it is resized to; None keeps its own.

    Raises
    ------
    DataError
        If `open_image` does not take it, or it cannot be decoded.
    """
    with open_image(path) as image:
        converted = image.convert(_MODES[channels])
    if size is not None:
        height, width = size
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(converted, dtype=np.uint8)
    return pixels.reshape(converted.height, converted.width, channels)


@contextlib.contextmanager
def open_image(path: str | Path) -> Iterator[Image.Image]:
    """Open an image, of which nothing is decoded yet.

    Raises
    ------
    DataError
        If it cannot be read, in this block either, or its pixels are grey ones of more
        than 8 bits. Pillow itself scales colours of 16 bits to 8.
    """
    try:
        with Image.open(path) as image:
            _require_8_bits(path, image.mode)
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {error}; remove or mend it"
        ) from error


def wide_pixels(mode: str) -> str | None:
    """Return what pixels of more than 8 bits a mode of Pillow's has; None with others.

    To convert them would cut them off at 255.
    """
    # The modes I;16B, I;16L and I;16N differ in the order of the bytes.
    return _WIDE_PIXELS.get(mode[:4])


def _require_8_bits(path: str | Path, mode: str) -> None:
    found = wide_pixels(mode)
    if found is not None:
        raise DataError(
            f"{path}: found {found} pixels (mode {mode}), expected 8-bit; scale them "
            "to 0-255 and save them again"
        )
