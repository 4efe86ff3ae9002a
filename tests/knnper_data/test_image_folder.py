import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knnper.data.images import ImageFolderSettings
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


def test_more_files_than_one_task_decodes(root: Path) -> None:
    for number in range(300):
        save(root / "train" / "cat" / f"x{number:03}.png", colour(number % 251))
    found = ImageFolderSettings(str(root)).load()
    reds = [2, 3, *(number % 251 for number in range(300)), 1]
    assert found.train.images[:, 0, 0, 0].tolist() == reds


def test_resize_and_grey(root: Path) -> None:
    save(root / "train" / "dog" / "large.png", colour(1, (9, 7)))
    settings = ImageFolderSettings(str(root), image_size=6, channels=1)
    found = settings.load()
    assert found.spec.image_shape == (6, 6, 1)
    grey = round((2 * 299 + 10 * 587 + 20 * 114) / 1000)
    assert np.unique(found.train.images[0]).tolist() == [grey]


def test_hidden_files_are_left_out(root: Path) -> None:
    (root / "train" / ".DS_Store").write_text("")
    (root / "train" / "cat" / ".thumbs").write_text("")
    assert len(ImageFolderSettings(str(root)).load().train) == 3


def test_clients_are_the_beginnings_of_names(root: Path) -> None:
    settings = ImageFolderSettings(str(root), client_separator="_")
    found = settings.load()
    assert found.train.client_ids is not None
    assert found.test.client_ids is not None
    assert found.train.client_ids.tolist() == [1, 2, 2]
    assert found.test.client_ids.tolist() == [0]


def test_a_name_without_a_client(root: Path) -> None:
    save(root / "test" / "cat" / "nobody.png", colour(1))
    settings = ImageFolderSettings(str(root), client_separator="_")
    with pytest.raises(DataError, match=r"nobody\.png.*'_'"):
        settings.load()


def test_unequal_sizes_name_both_files(root: Path) -> None:
    save(root / "test" / "cat" / "odd.png", colour(1, (9, 7)))
    expected = r"u1_a\.png is 5x4 but .*odd\.png is 7x9.*data\.image_size"
    with pytest.raises(DataError, match=expected):
        ImageFolderSettings(str(root)).load()


@pytest.mark.parametrize("kept_bytes", [0, 20, -25])
def test_a_truncated_image_is_named(root: Path, kept_bytes: int) -> None:
    file = save(root / "train" / "dog" / "zz.png", colour(1))
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(DataError, match=r"zz\.png cannot be read as an image"):
        ImageFolderSettings(str(root)).load()


def test_an_unreadable_first_image_is_named(root: Path) -> None:
    (root / "train" / "cat" / "a.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image"):
        ImageFolderSettings(str(root)).load()


def test_what_lies_in_the_wrong_place_is_named(root: Path) -> None:
    (root / "train" / "cat" / "deeper").mkdir()
    with pytest.raises(DataError, match="deeper is a folder where an image"):
        ImageFolderSettings(str(root)).load()
    (root / "test" / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"notes\.txt is a file where a class folder"):
        ImageFolderSettings(str(root)).load()


def test_changed_files_are_decoded_again(root: Path) -> None:
    ImageFolderSettings(str(root)).load()
    file = save(root / "test" / "dog" / "u0_c.png", colour(99))
    os.utime(file, ns=(1, 1))
    found = ImageFolderSettings(str(root)).load()
    assert found.test.images[0, 0, 0, 0] == 99


def test_a_class_need_not_be_tested_on(root: Path) -> None:
    (root / "test" / "cat").mkdir()
    assert len(ImageFolderSettings(str(root)).load().test) == 1


def test_a_class_whose_name_is_not_utf8(root: Path) -> None:
    save(root / "train" / "caf\udce9" / "a.png", colour(1))
    with pytest.raises(DataError, match=r"class folder 'caf.udce9', whose name is not"):
        ImageFolderSettings(str(root)).load()


def test_a_file_may_have_any_name(root: Path) -> None:
    save(root / "train" / "cat" / "caf\udce9.png", colour(1))
    assert len(ImageFolderSettings(str(root)).load().train) == 4


def test_test_images_that_are_copies_are_counted(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ImageFolderSettings(str(root)).load()
    assert not caplog.records
    for red in (2, 3):
        save(root / "test" / "cat" / f"{red}.bmp", colour(red))
    ImageFolderSettings(str(root)).load()
    assert "2 of 3 test images are copies of training images" in caplog.text


def put(root: Path, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: put(root, "test/bird/a.png"), "no training example has: bird"),
        (lambda root: shutil.rmtree(root / "train"), r"train is not a .*data\.root"),
        (lambda root: (root / "test/dog/u0_c.png").unlink(), "test holds no images"),
        (
            lambda root: put(root, "train/bird/.hidden"),
            "train holds no images of the classes bird,",
        ),
    ],
)
def test_classes_and_splits_that_are_not_there(
    root: Path, change: Callable[[Path], None], message: str
) -> None:
    change(root)
    with pytest.raises(DataError, match=message):
        ImageFolderSettings(str(root)).load()
