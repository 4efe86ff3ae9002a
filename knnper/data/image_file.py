"""One image file as pixels."""

from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from knnper.config.errors import DataError

_MODES = {1: "L", 3: "RGB"}

DECODER = f"1, Pillow {PIL.__version__}"
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
        If it cannot be read as an image.
    """
    try:
        with Image.open(path) as image:
            converted = image.convert(_MODES[channels])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise unreadable(path, error) from error
    if size is not None:
        height, width = size
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(converted, dtype=np.uint8)
    return pixels.reshape(converted.height, converted.width, channels)


def unreadable(path: str | Path, error: Exception) -> DataError:
    """Return what is said of a file that is no image."""
    return DataError(f"{path} cannot be read as an image: {error}; remove or mend it")
