"""Images as they are sent and shown, as the arrays that a model takes and stores."""

import base64
import binascii
import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from client.service.limits import Limits
from client.service.problems import RequestError
from knnper.data.image_file import wide_pixels

_MODES = {1: "L", 3: "RGB"}
_FORMATS = ("PNG", "JPEG")


def is_picture(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether inputs of this layout can be sent and shown as images."""
    return dtype == "uint8" and len(shape) == 3 and shape[2] in _MODES


def decode_picture(
    content: bytes, shape: tuple[int, ...], limits: Limits
) -> NDArray[np.uint8]:
    """Return the pixels of a PNG or JPEG file.

    Colours are converted and the size is changed as `knnper.data.image_file` does.

    Parameters
    ----------
    content
        The file.
    shape
        (height, width, channels) that the model takes.
    limits
        Gives the most pixels of the file's image.

    Returns
    -------
    numpy.ndarray
        uint8 of this shape.

    Raises
    ------
    RequestError
        422 if it is no such file, is damaged, is too large when decoded, or has pixels
        of more than 8 bits.
    """
    height, width, channels = shape
    try:
        # The limit below is ours; Pillow's own would only warn.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return _decoded(content, (width, height), _MODES[channels], limits)
    # Pillow raises what its decoders do, with damaged files.
    except (
        OSError,
        SyntaxError,
        ValueError,
        OverflowError,
        EOFError,
        Image.DecompressionBombError,
    ) as error:
        raise RequestError(
            422, f"expected an image as PNG or JPEG, found what cannot be read: {error}"
        ) from error


def _decoded(
    content: bytes, size: tuple[int, int], mode: str, limits: Limits
) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        # Nothing is decoded before this is known.
        if image.width * image.height > limits.max_pixels:
            raise RequestError(
                422,
                f"found an image of {image.width}x{image.height} pixels, expected at "
                f"most {limits.max_pixels}; make it smaller",
            )
        wide = wide_pixels(image.mode)
        if wide is not None:
            raise RequestError(
                422,
                f"found {wide} pixels (mode {image.mode}), expected 8-bit; scale them "
                "to 0-255",
            )
        converted = image.convert(mode)
    if converted.size != size:
        converted = converted.resize(size, Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(converted, dtype=np.uint8)
    return pixels.reshape(size[1], size[0], -1)


def decode_base64(text: str) -> bytes:
    """Return the bytes that base64 text stands for.

    Raises
    ------
    RequestError
        422 if it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(422, f"expected an image in base64: {error}") from error


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG file of pixels, uint8 of shape (height, width, 1 or 3)."""
    file = io.BytesIO()
    flat = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    Image.fromarray(np.ascontiguousarray(flat)).save(file, "PNG")
    return file.getvalue()
