"""What schemathesis, which loads this, cannot know: pictures, and files of arrays."""

import base64
import io
import os

import numpy as np
import schemathesis
from hypothesis import strategies as st
from PIL import Image

# What the service takes that is tested, as in "2,4,1 uint8".
_SHAPE, DTYPE = os.environ["KNNPER_TEST_INPUT"].split()
SHAPE = tuple(map(int, _SHAPE.split(",")))


def _picture(size: tuple[int, int], shade: int, kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (shade, 0, 255 - shade)).save(file, kind)
    return file.getvalue()


def _array_file(count: int, shade: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.full((count, *SHAPE), shade, DTYPE))
    return file.getvalue()


_SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))
_SHADES = st.integers(0, 255)
PNG = st.builds(_picture, _SIZES, _SHADES, st.just("PNG"))
JPEG = st.builds(_picture, _SIZES, _SHADES, st.just("JPEG"))
ARRAYS = st.builds(_array_file, st.integers(1, 3), _SHADES)

schemathesis.openapi.media_type("image/png", PNG)
schemathesis.openapi.media_type("image/jpeg", JPEG)
schemathesis.openapi.media_type("application/x-npy", ARRAYS)
schemathesis.openapi.format(
    "picture-base64", (PNG | JPEG).map(lambda file: base64.b64encode(file).decode())
)
