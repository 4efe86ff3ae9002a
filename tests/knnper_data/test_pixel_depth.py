"""Pixels of more than 8 bits a channel are refused, wherever Pillow hides them."""

import io
import struct
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from knnper.data.images import EncodedImage, decode_files, read_image
from knnper.errors import DataError
from tests.knnper_data.wide_pictures import (
    COLOUR,
    COLOUR_AND_ALPHA,
    GREY,
    GREY_AND_ALPHA,
    SIDE,
    netpbm,
    png16,
    sgi,
    tiff,
    values,
)

BLACK_IS_ZERO, RGB, CMYK = 1, 2, 5


def refusal(content: bytes) -> str:
    with pytest.raises(DataError) as refused:
        read_image(EncodedImage("a", content), 3)
    return str(refused.value)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        *(
            (lambda colour=colour: png16(colour), "16-bit")
            for colour in (GREY, COLOUR, GREY_AND_ALPHA, COLOUR_AND_ALPHA)
        ),
        (lambda: tiff(values(3), photometric=RGB), "16-bit"),
        (lambda: tiff(values(3), photometric=RGB, planes=True), "16-bit"),
        (lambda: tiff(values(4), photometric=CMYK), "16-bit"),
        (
            lambda: tiff(
                values(1, 255).astype(np.int8),
                photometric=BLACK_IS_ZERO,
                sample_format=2,
            ),
            "signed",
        ),
        (lambda: netpbm("P6", 4095), "12-bit"),
        (lambda: netpbm("P3", 4095), "12-bit"),
        (lambda: netpbm("P6", 65535), "16-bit"),
        (lambda: sgi(2), "16-bit"),
    ],
)
def test_wide_pixels_are_refused(make: Callable[[], bytes], found: str) -> None:
    assert f"a: found {found} pixels" in refusal(make())
    assert "expected 8-bit; scale them to 0-255" in refusal(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiff(values(3, 255).astype(np.uint8), photometric=RGB),
        lambda: tiff(values(3, 255).astype(np.uint8), photometric=RGB, planes=True),
        lambda: netpbm("P6", 255),
        lambda: sgi(1),
    ],
)
def test_eight_bits_are_taken_as_they_are(make: Callable[[], bytes]) -> None:
    pixels = read_image(EncodedImage("a", make()), 3)
    # SGI's rows come from below.
    expected = values(3, 255)[::-1] if make() == sgi(1) else values(3, 255)
    np.testing.assert_array_equal(pixels, expected)


def test_white_of_less_than_8_bits_is_scaled() -> None:
    pixels = read_image(EncodedImage("a", netpbm("P6", 15)), 3)
    np.testing.assert_array_equal(pixels, values(3, 15) * 17)


def test_any_error_of_a_decoder_is_a_refusal() -> None:
    # Pillow raises NotImplementedError for this pixel format of DDS.
    pixel_format = struct.pack("<2I4s5I", 32, 4, struct.pack("<I", 113), 0, 0, 0, 0, 0)
    header = struct.pack("<7I", 124, 0x1007, SIDE, SIDE, 0, 0, 0) + bytes(44)
    content = b"DDS " + header + pixel_format + bytes(20 + 512)
    assert "a cannot be read as an image: " in refusal(content)


def test_first_of_several_images_is_read_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files: list[EncodedImage] = []
    for kind in ("GIF", "PNG", "TIFF", "MPO"):
        frames = [Image.new("RGB", (SIDE, SIDE), (value,) * 3) for value in (0, 255)]
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        files.append(EncodedImage(kind, file.getvalue()))
    images = np.full((4, SIDE, SIDE, 3), 99, dtype=np.uint8)
    assert decode_files(files, images) == {}
    assert not images.any()
    # The second image of a camera's MPO is its preview.
    (record,) = caplog.records
    assert "3 of 4 files hold several images" in record.getMessage()
