import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image

from knnper.data.image_folders import ImageFolderSettings
from knnper.data.images import open_image, read_image
from knnper.errors import DataError


def save(file: Path, pixels: np.ndarray) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
    return file


def colour(red: int, size: tuple[int, int] = (4, 5)) -> np.ndarray:
    """Return an image of one colour; ``size`` is (height, width)."""
    return np.full((*size, 3), (red, 10, 20), dtype=np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    save(folder / "train" / "dog" / "u2_b.png", colour(1))
    save(folder / "train" / "cat" / "u1_a.png", colour(2))
    save(folder / "train" / "cat" / "u2_a.png", colour(3))
    save(folder / "test" / "dog" / "u0_c.png", colour(4))
    return folder


def test_images_labels_and_classes(root: Path) -> None:
    found = ImageFolderSettings(str(root)).load()
    assert found.class_names == ("cat", "dog")
    assert found.spec.image_shape == (4, 5, 3)
    assert found.train.labels.tolist() == [0, 0, 1]
    assert found.test.labels.tolist() == [1]
    np.testing.assert_array_equal(
        found.train.images, np.stack([colour(2), colour(3), colour(1)])
    )
    assert found.train.client_ids is None
    # Clients are the beginnings of names.
    found = ImageFolderSettings(str(root), client_separator="_").load()
    np.testing.assert_array_equal(found.train.client_ids, [1, 2, 2])
    np.testing.assert_array_equal(found.test.client_ids, [0])


def test_photos_are_as_people_see_them(root: Path) -> None:
    """Cameras store the sensor's rows, and in EXIF how they were held."""
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, 8:] = 255  # The right half, which is above when turned to the left
    for file in root.rglob("*.png"):
        file.unlink()
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 8
        Image.fromarray(pixels).save(file.with_suffix(".jpg"), exif=exif)
    found = ImageFolderSettings(str(root)).load()
    assert found.spec.image_shape == (16, 8, 3)
    halves = found.train.images[0].reshape(2, -1).mean(axis=1)
    assert halves.tolist() == pytest.approx([255, 0], abs=5)


def test_more_files_than_one_task_decodes(root: Path) -> None:
    for number in range(300):
        save(root / "train" / "cat" / f"x{number:03}.png", colour(number % 251))
    found = ImageFolderSettings(str(root)).load()
    reds = [2, 3, *(number % 251 for number in range(300)), 1]
    assert found.train.images[:, 0, 0, 0].tolist() == reds


def test_resize_and_grey(root: Path) -> None:
    save(root / "train" / "dog" / "large.png", colour(1, (9, 7)))
    found = ImageFolderSettings(str(root), image_size=6, channels=1).load()
    assert found.spec.image_shape == (6, 6, 1)
    grey = round((2 * 299 + 10 * 587 + 20 * 114) / 1000)
    assert np.unique(found.train.images[0]).tolist() == [grey]


def test_other_files_and_names(root: Path) -> None:
    (root / "train" / ".DS_Store").write_text("")
    (root / "train" / "cat" / ".thumbs").write_text("")
    (root / "test" / "cat").mkdir()
    save(root / "train" / "cat" / "caf\udce9.png", colour(1))
    found = ImageFolderSettings(str(root)).load()
    assert (len(found.train), len(found.test)) == (4, 1)


def put(root: Path, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()


def cut(root: Path, kept_bytes: int) -> None:
    file = save(root / "train" / "dog" / "u1_zz.png", colour(1))
    file.write_bytes(file.read_bytes()[:kept_bytes])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: put(root, "test/bird/a.png"), "no training example has: bird"),
        (lambda root: shutil.rmtree(root / "train"), r"train is not a .*data\.root"),
        (lambda root: (root / "test/dog/u0_c.png").unlink(), "test holds no images"),
        (
            lambda root: put(root, "train/bird/.hidden"),
            "no images of the classes bird,",
        ),
        (
            lambda root: save(root / "test/cat/u_odd.png", colour(1, (9, 7))),
            r"u1_a\.png is 5x4 but .*odd\.png is 7x9.*data\.image_size",
        ),
        (lambda root: cut(root, 0), r"zz\.png cannot be read as an image"),
        (lambda root: cut(root, 20), r"zz\.png cannot be read as an image"),
        (lambda root: cut(root, -25), r"zz\.png cannot be read as an image"),
        (lambda root: (root / "train/cat/deeper").mkdir(), "deeper is a folder where"),
        (
            lambda root: save(root / "train" / "caf\udce9" / "a.png", colour(1)),
            r"class folder 'caf.udce9', whose name is not",
        ),
        (lambda root: save(root / "test/cat/no.png", colour(1)), r"no\.png.*'_'"),
    ],
)
def test_what_is_refused(
    root: Path, change: Callable[[Path], object], message: str
) -> None:
    change(root)
    with pytest.raises(DataError, match=message):
        ImageFolderSettings(str(root), client_separator="_").load()


def test_changed_files_are_decoded_again(root: Path) -> None:
    ImageFolderSettings(str(root)).load()
    file = save(root / "test" / "dog" / "u0_c.png", colour(99))
    os.utime(file, ns=(1, 1))
    found = ImageFolderSettings(str(root)).load()
    assert found.test.images[0, 0, 0, 0] == 99


def test_test_images_that_are_copies_are_counted(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ImageFolderSettings(str(root)).load()
    assert not caplog.records
    for red in (2, 3):
        save(root / "test" / "cat" / f"{red}.bmp", colour(red))
    ImageFolderSettings(str(root)).load()
    assert "2 of 3 test images are exact copies of training images" in caplog.text


RAMP = np.arange(0, 4096, 256).reshape(4, 4)


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


def test_other_files_of_more_than_8_bits(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    Image.frombytes("I;16B", (4, 4), RAMP.astype(">u2").tobytes()).save(file)
    with pytest.raises(DataError, match="found 16-bit pixels"):
        read_image(file, 1)
    (tmp_path / "a.pgm").write_bytes(b"P5 2 1 4095 " + bytes([0, 1, 15, 255]))
    with pytest.raises(DataError, match=r"a\.pgm: found 16-bit or 32-bit pixels"):
        read_image(tmp_path / "a.pgm", 1)


def test_eight_bits_are_kept(tmp_path: Path) -> None:
    pixels = (RAMP // 16).astype(np.uint8)
    file = save(tmp_path / "a.png", pixels)
    np.testing.assert_array_equal(read_image(file, 1)[..., 0], pixels)
    np.testing.assert_array_equal(read_image(file, 3)[..., 2], pixels)


def test_what_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"a\.png cannot be read as an image: .*; remove or fix it"
    with pytest.raises(DataError, match=expected), open_image(tmp_path / "a.png"):
        pass
    file = save(tmp_path / "a.png", np.zeros((4, 4), dtype=np.uint8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2)
    with pytest.raises(DataError, match=expected), open_image(file):
        pass
