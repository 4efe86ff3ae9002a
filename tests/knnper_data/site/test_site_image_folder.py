"""Own data as image files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knnper.data.examples import InputSpec
from knnper.data.images import read_image
from knnper.data.site_data import SiteTask
from knnper.errors import DataError
from tests.knnper_data.site.site_cases import (
    FEATURES,
    IMAGES,
    NAMES,
    classes,
    opened,
    put_image,
    split_of,
    surveyed,
)


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    put = {
        f"{NAMES[number % 3]}/{number}.png": put_image(
            tmp_path / NAMES[number % 3] / f"{number}.png", number
        )
        for number in range(30)
    }
    (tmp_path / "cat" / "notes.txt").write_text("")
    (tmp_path / "cat" / ".hidden").write_text("")
    data = opened("image_folder", tmp_path, IMAGES, path=".")

    assert classes(data) == {name: name.split("/")[0] for name in put}
    assert data.num_ignored == 1
    assert len(data.validation) > 0
    for _, part in data.splits():
        for name, image in zip(part.names, part.examples.images, strict=True):
            np.testing.assert_array_equal(image.numpy(), put[name])


def test_an_image_stays_in_its_split_when_others_come(tmp_path: Path) -> None:
    for number in range(20):
        put_image(tmp_path / "cat" / f"{number}.png", number)
    before = split_of(opened("image_folder", tmp_path, IMAGES, path="."))
    for number in range(20, 40):
        put_image(tmp_path / "dog" / f"{number}.png", number)
    after = split_of(opened("image_folder", tmp_path, IMAGES, path="."))
    assert {name: after[name] for name in before} == before


def test_a_folder_for_each_split(tmp_path: Path) -> None:
    put_image(tmp_path / "train" / "cat" / "a.png", 1)
    put_image(tmp_path / "train" / "fox" / "b.png", 2)
    put_image(tmp_path / "validation" / "dog" / "a.png", 3)
    (tmp_path / "test").mkdir()
    data = opened("image_folder", tmp_path, IMAGES, path=str(tmp_path))
    assert split_of(data) == {
        "train/cat/a.png": "train",
        "train/fox/b.png": "train",
        "validation/dog/a.png": "validation",
    }
    assert classes(data)["validation/dog/a.png"] == "dog"


def test_a_split_by_another_name(tmp_path: Path) -> None:
    put_image(tmp_path / "train" / "cat" / "a.png", 1)
    (tmp_path / "val").mkdir()
    message = "expected a split; known: test, train, validation.*data.layout: classes"
    with pytest.raises(DataError, match=message):
        opened("image_folder", tmp_path, IMAGES, path=".")


def test_train_can_be_a_class(tmp_path: Path) -> None:
    put_image(tmp_path / "train" / "a.png", 1)
    put_image(tmp_path / "bus" / "a.png", 2)
    task = SiteTask(InputSpec((4, 4, 3), 2, (0.5,) * 3, (1.0,) * 3), ("bus", "train"))
    data = opened("image_folder", tmp_path, task, path=".", layout="classes")
    assert set(classes(data)) == {"bus/a.png", "train/a.png"}


def test_images_become_what_the_federation_agreed_on(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "a.png", 1)
    task = SiteTask(InputSpec((2, 8, 1), 3, (0.5,), (1.0,)), NAMES)
    data = opened("image_folder", tmp_path, task, path=".")
    expected = read_image(tmp_path / "cat" / "a.png", 1, (2, 8))
    np.testing.assert_array_equal(data.train.examples.images[0], expected)


def test_all_unreadable_images_are_named(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "good.png", 1)
    for number in range(12):
        (tmp_path / "cat" / f"bad{number}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"(?s)12 examples cannot be read.*and 2 more"):
        opened("image_folder", tmp_path, IMAGES, path=".")
    data = surveyed("image_folder", tmp_path, IMAGES, path=".")
    assert set(split_of(data)) == {"cat/good.png"}
    assert set(data.unreadable) == {f"cat/bad{number}.png" for number in range(12)}


def test_unknown_classes_are_not_even_read(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "a.png", 1)
    (tmp_path / "gnu").mkdir()
    (tmp_path / "gnu" / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="'gnu': 1 example\n"):
        opened("image_folder", tmp_path, IMAGES, path=".")
    data = opened("image_folder", tmp_path, IMAGES, path=".", unknown_labels="drop")
    assert data.dropped == {"gnu": 1}
    assert len(data.train) == 1


def test_without_a_task_the_first_image_speaks(tmp_path: Path) -> None:
    put_image(tmp_path / "b" / "x.png", 1)
    put_image(tmp_path / "a" / "y.png", 2)
    task = surveyed("image_folder", tmp_path, path=".").task
    assert task.class_names == ("a", "b")
    assert task.spec.image_shape == (4, 4, 3)
    grey = tmp_path / "grey" / "c" / "z.png"
    grey.parent.mkdir(parents=True)
    Image.new("L", (6, 5)).save(grey)
    task = surveyed("image_folder", tmp_path / "grey", path=".").task
    assert task.spec.image_shape == (5, 6, 1)


def test_what_does_not_fit(tmp_path: Path) -> None:
    two = SiteTask(InputSpec((4, 4, 2), 3, (0.5,) * 2, (1.0,) * 2), NAMES)
    (tmp_path / "empty").mkdir()
    put_image(tmp_path / "good" / "cat" / "a.png", 1)
    put_image(tmp_path / "loose" / "a.png", 1)
    put_image(tmp_path / "bytes" / "cat" / "a\udce9.png", 1)
    for path, task, message in (
        ("good", FEATURES, r"agreed on rows of features \(float32\)"),
        ("good", two, "have 1 or 3 channels"),
        ("missing", IMAGES, "there is no such folder; expected PATH/CLASS"),
        ("empty", IMAGES, "holds no examples"),
        ("loose", IMAGES, r"a\.png is a file where the folder"),
        # No store takes this name.
        ("bytes", IMAGES, r"cannot be written as UTF-8, such as 'cat/a"),
    ):
        with pytest.raises(DataError, match=message):
            opened("image_folder", tmp_path, task, path=path)


def test_pixels_of_16_bits(tmp_path: Path) -> None:
    file = tmp_path / "cat" / "a.png"
    file.parent.mkdir()
    Image.fromarray(np.full((4, 4), 4000, dtype=np.uint16)).save(file)
    with pytest.raises(DataError, match=r"a\.png: found 16-bit.*expected 8-bit"):
        surveyed("image_folder", tmp_path, path=".")
    put_image(tmp_path / "dog" / "b.png", 1)
    data = surveyed("image_folder", tmp_path, IMAGES, path=".")
    assert "found 16-bit" in data.unreadable["cat/a.png"]
