"""Inputs in files: PNG and JPEG images, and arrays of ``numpy.save``."""

import io
import math
import tokenize
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from knnper.client.service.bodies import Budget
from knnper.client.service.errors import RequestError
from knnper.data.examples import InputSpec
from knnper.data.images import upright
from knnper.data.pixel_depth import wide_pixels

LARGEST_FLOAT = float(np.finfo(np.float32).max)
_FORMATS = ("PNG", "JPEG")
_MODES = {1: "L", 3: "RGB"}  # Pillow's, by number of channels

# A progressive JPEG has about ten scans, and each goes over all pixels. An empty
# scan takes few bytes, so a small file can hold thousands: every 16 count as decoding
# the image once more.
_SCAN = b"\xff\xda"
_SCANS_PER_PASS = 16
# Pillow joins the segments of a JPEG's Exif data in quadratic time. Cameras write one.
_EXIF = b"Exif\0\0"
_MAX_EXIF = 16

# What Pillow's decoders raise for damaged files.
_IMAGE_ERRORS = (OSError, SyntaxError, ValueError, OverflowError, EOFError)
# What NumPy raises for a damaged header, which it evaluates as a Python literal.
_HEADER_ERRORS = (
    KeyError,
    ValueError,
    SyntaxError,
    TypeError,
    RecursionError,
    MemoryError,
    tokenize.TokenError,
)
_NPY_TYPES = {
    "uint8": ("uint8",),
    "float32": ("float32", "float64"),
    "int32": ("int32", "int64"),
}
_NPY_HEADERS: dict[tuple[int, int], Callable[..., Any]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


def is_picture(spec: InputSpec) -> bool:
    """Whether inputs of this kind can be sent and shown as images."""
    shape = spec.image_shape
    return spec.dtype == "uint8" and len(shape) == 3 and shape[2] in _MODES


def decode_picture(
    content: bytes, spec: InputSpec, budget: Budget
) -> NDArray[np.uint8]:
    """Decode a PNG or JPEG file to pixels of shape (1, height, width, channels).

    Colours and size are converted as `knnper.data.images` does.
    """
    height, width, channels = spec.image_shape
    try:
        # The budget limits the size; Pillow's own limit would only warn.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = _open_image(content, _MODES[channels], budget)
    except Image.DecompressionBombError as error:
        raise RequestError(413, f"found an image that is too large: {error}") from error
    except _IMAGE_ERRORS as error:
        is_unknown = isinstance(error, UnidentifiedImageError)
        kind = "another kind of file" if is_unknown else f"a damaged one: {error}"
        raise RequestError(
            422, f"expected an image as PNG or JPEG, found {kind}"
        ) from error
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8).reshape(1, height, width, channels)


def _open_image(content: bytes, mode: str, budget: Budget) -> Image.Image:
    if content.count(_EXIF) > _MAX_EXIF:
        raise RequestError(
            422, f"found Exif data in more than {_MAX_EXIF} pieces; remove it"
        )
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        num_scans = content.count(_SCAN) if image.format != "PNG" else 1
        passes = 1 + num_scans // _SCANS_PER_PASS
        budget.take_pixels(image.width, image.height, passes)
        wide = wide_pixels(image)
        if wide is not None:
            raise RequestError(
                422,
                f"found {wide} pixels (mode {image.mode}), expected 8-bit; scale them "
                "to 0-255",
            )
        return upright(image).convert(mode)


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels, uint8 of shape (height, width, 1 or 3), as a PNG file."""
    file = io.BytesIO()
    flat = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    Image.fromarray(np.ascontiguousarray(flat)).save(file, "PNG")
    return file.getvalue()


def read_npy(content: bytes, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Read the inputs (n, *shape) in a file of ``numpy.save``, as ``dtype``.

    NumPy reads the header alone: `numpy.load` would allocate any size that the header
    claims. Arrays of objects, which hold code, are not among the types that are taken.
    """
    file = io.BytesIO(content)
    try:
        array_shape, is_fortran, array_type = _NPY_HEADERS[npy.read_magic(file)](file)
    except _HEADER_ERRORS as error:
        raise RequestError(
            400, f"expected a file of numpy.save, found one that is damaged: {error}"
        ) from error
    names = _NPY_TYPES[dtype]
    if array_type not in [np.dtype(name) for name in names]:
        types = " or ".join(names)
        raise RequestError(422, f"expected an array of {types}, found {array_type}")
    if array_shape != shape and array_shape[1:] != shape:
        shapes = f"{shape} or (n, *{shape})"
        raise RequestError(422, f"expected the shape {shapes}, found {array_shape}")
    data = content[file.tell() :]
    # A claimed shape may be negative.
    is_whole = math.prod(array_shape) * array_type.itemsize == len(data)
    if not is_whole or min(array_shape) < 0:
        raise RequestError(400, "the array is cut short, or more follows it")
    order: Literal["F", "C"] = "F" if is_fortran else "C"
    array = np.frombuffer(data, array_type).reshape(array_shape, order=order)
    if dtype == "float32" and not (np.abs(array) <= LARGEST_FLOAT).all():
        raise RequestError(422, "expected numbers that float32 can hold, no NaN")
    if dtype == "int32":
        # Larger numbers would wrap around to another id.
        array = np.clip(array, -1, np.iinfo(np.int32).max)
    return np.array(array, dtype, order="C").reshape(-1, *shape)
