"""What an image file's pixels become, and which are refused."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from knnper.data.images import open_image, read_image
from knnper.errors import DataError

RAMP = np.arange(0, 4096, 256).reshape(4, 4)


def save(file: Path, pixels: NDArray[np.generic]) -> Path:
    Image.fromarray(pixels).save(file)
    return file


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("name", "pixels", "found"),
    [
        ("a.png", RAMP.astype(np.uint16), "16-bit"),
        ("a.tif", RAMP.astype(np.uint16), r"16-bit pixels \(mode I;16\)"),
        ("a.tif", RAMP.astype(np.int32), "32-bit"),
        ("a.tif", (RAMP / 4096).astype(np.float32), r"floating-point .*\(mode F\)"),
    ],
)
def test_pixels_that_would_be_cut_off(
    tmp_path: Path, name: str, pixels: NDArray[np.generic], found: str, channels: int
) -> None:
    file = save(tmp_path / name, pixels)
    expected = rf"{name}: found .*{found}.*, expected 8-bit; scale them to 0-255"
    with pytest.raises(DataError, match=expected):
        read_image(file, channels)


def test_big_endian_16_bit(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    Image.frombytes("I;16B", (4, 4), RAMP.astype(">u2").tobytes()).save(file)
    with pytest.raises(DataError, match="found 16-bit pixels"):
        read_image(file, 1)


def test_a_grey_map_of_more_than_8_bits(tmp_path: Path) -> None:
    (tmp_path / "a.pgm").write_bytes(b"P5 2 1 4095 " + bytes([0, 1, 15, 255]))
    with pytest.raises(DataError, match=r"a\.pgm: found 16-bit or 32-bit pixels"):
        read_image(tmp_path / "a.pgm", 1)


def test_eight_bits_are_kept(tmp_path: Path) -> None:
    pixels = (RAMP // 16).astype(np.uint8)
    file = save(tmp_path / "a.png", pixels)
    np.testing.assert_array_equal(read_image(file, 1)[..., 0], pixels)
    np.testing.assert_array_equal(read_image(file, 3)[..., 2], pixels)


def test_what_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"a\.png cannot be read as an image: .*; remove or mend it"
    with pytest.raises(DataError, match=expected), open_image(tmp_path / "a.png"):
        pass
    file = save(tmp_path / "a.png", np.zeros((4, 4), dtype=np.uint8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2)
    with pytest.raises(DataError, match=expected), open_image(file):
        pass
