"""Images that would be left out without a word: links, formats, splits, clutter."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from knnper.data.domain_folder import DomainFolderSettings
from knnper.data.examples import Dataset
from knnper.data.image_folders import ImageFolderSettings
from knnper.data.site_check import check_site
from knnper.datastore.transfer import open_source
from knnper.errors import DataError
from tests.knnper_data.site.site_cases import (
    IMAGES,
    classes,
    opened,
    put_image,
    split_of,
    surveyed,
)
from tests.knnper_data.test_folders import put_clutter

NOWHERE = "/mnt/not-mounted"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "own"  # beside the cache


@pytest.fixture(autouse=True)
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield


def put(root: Path, *folders: str, count: int = 4) -> None:
    """Put ``count`` different images into each folder."""
    for folder in folders:
        for number in range(count):
            name = f"{folder.replace('/', '_').lower()}{number}"
            put_image(root / folder / f"{name}.png", hash_of(name))


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode()[-6:], "big")


def central(root: Path, **settings: object) -> Dataset:
    return ImageFolderSettings(root=str(root), **settings).load()  # type: ignore[arg-type]


def sizes(data: Dataset) -> tuple[int, int]:
    return len(data.train), len(data.test)


def test_splits_in_capitals_are_those_in_small_letters(root: Path) -> None:
    put(root, "Training/cat", "Training/dog", count=3)
    put(root, "Testing/cat", "Testing/dog", count=1)
    data = central(root)
    (root / "Training").rename(root / "train")
    (root / "Testing").rename(root / "test")
    expected = central(root)
    assert sizes(data) == sizes(expected) == (6, 2)
    for part, other in ((data.train, expected.train), (data.test, expected.test)):
        np.testing.assert_array_equal(part.images, other.images)
        np.testing.assert_array_equal(part.labels, other.labels)
    assert data.client_names == ()


@pytest.mark.parametrize("name", ["val", "Valid", "validation", "dev_set"])
def test_validation_data_is_trained_on_and_named(
    root: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    put(root, "train/cat", "train/dog", "test/cat", count=2)
    put(root, f"{name}/cat", f"{name}/owl", count=3)
    data = central(root)
    assert sizes(data) == (10, 2)
    assert data.class_names == ("cat", "dog", "owl")
    assert f"the 6 images in {name} are added to the training data" in caplog.text
    caplog.clear()
    central(root)
    assert caplog.text == ""  # in one process, once


def test_clients_keep_their_validation_data(root: Path) -> None:
    put(root, "train/zoe/cat", "val/zoe/cat", "val/adam/cat", "test/zoe/cat", count=2)
    data = central(root)
    assert data.client_names == ("adam", "zoe")
    assert data.train.client_ids is not None
    assert np.bincount(data.train.client_ids).tolist() == [2, 4]


def test_other_folders_beside_splits_are_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(root, "train/cat", "test/cat", "eval/cat", count=2)
    assert sizes(central(root)) == (2, 2)
    assert "found eval beside the splits train, test; no image" in caplog.text


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (
            "train/cat val/cat",
            r"own/test is not a folder, .*If .* data\.layout: classes",
        ),
        ("Train/cat Eval/cat", r"'Train' and 'Eval'.* data\.layout: classes"),
        ("seg_train/cat seg_test/cat", "'seg_train' and 'seg_test'"),
        (
            "cat/train cat/test dog/train dog/test",
            "'test' and 'train'|'train' and 'test'",
        ),
        (
            "train/zoe/cat test/cat",
            "expected folders of clients in all splits, or in no",
        ),
    ],
)
def test_unclear_splits_are_refused(root: Path, folders: str, message: str) -> None:
    put(root, *folders.split(), count=2)
    with pytest.raises(DataError, match=message):
        central(root)


def test_classes_may_have_names_of_splits(root: Path) -> None:
    put(root, "cat/train", "cat/test", "dog/train", "dog/test", count=2)
    data = central(root, layout="classes")
    assert (data.class_names, data.client_names) == (("test", "train"), ("cat", "dog"))


@pytest.mark.parametrize("name", ["Training", "test_set", "dev", "EVAL", "Valid"])
def test_a_domain_is_no_split(root: Path, name: str) -> None:
    put(root, "photo/cat", f"{name}/cat")
    with pytest.raises(DataError, match=f"own/{name}: found the name of a split"):
        DomainFolderSettings(root=str(root)).load()


def test_domains_of_parts_of_splits_are_refused(root: Path) -> None:
    put(root, "seg_train/cat", "seg_test/cat")
    with pytest.raises(DataError, match="found 'seg_train' and 'seg_test'"):
        DomainFolderSettings(root=str(root)).load()


def test_the_splits_of_a_site_by_other_names(root: Path) -> None:
    put(root, "Training/cat", "VAL/dog", "Test/cat", count=1)
    data = opened("image_folder", root, IMAGES, path=".")
    assert split_of(data) == {
        "Training/cat/training_cat0.png": "train",
        "VAL/dog/val_dog0.png": "validation",
        "Test/cat/test_cat0.png": "test",
    }
    put(root, "eval/cat")
    with pytest.raises(DataError, match="eval: found beside the folder Training, expe"):
        opened("image_folder", root, IMAGES, path=".")


@pytest.mark.parametrize("place", ["u3", "u2/dog"])
@pytest.mark.parametrize("on_error", ["refuse", "skip"])
def test_a_broken_link_to_a_client_or_class_is_refused(
    root: Path, place: str, on_error: str
) -> None:
    put(root, "u1/cat", "u1/dog", "u2/cat")
    (root / place).symlink_to(f"{NOWHERE}/{place}")
    message = f"own/{place} is a link to {NOWHERE}/{place}, which cannot be followed"
    with pytest.raises(DataError, match=message):
        central(root, on_error=on_error)
    with pytest.raises(DataError, match=message):
        DomainFolderSettings(root=str(root)).load()


@pytest.mark.parametrize("name", ["test", "val"])
def test_a_broken_link_to_a_split_is_refused(root: Path, name: str) -> None:
    put(root, "train/cat", "test/cat" if name == "val" else "val/cat")
    (root / name).symlink_to(f"{NOWHERE}/{name}")
    with pytest.raises(DataError, match=f"own/{name} is a link to {NOWHERE}/{name}"):
        central(root)
    with pytest.raises(DataError, match=f"own/{name} is a link to {NOWHERE}/{name}"):
        opened("image_folder", root, IMAGES, path=".")


def test_a_broken_link_to_a_class_of_a_site_or_a_store(root: Path) -> None:
    put(root, "cat")
    (root / "dog").symlink_to("dog")
    message = "own/dog is a link to dog, which .* Too many levels"
    with pytest.raises(DataError, match=message):
        opened("image_folder", root, IMAGES, path=".")
    with pytest.raises(DataError, match=message):
        open_source(root, (4, 4, 3), ("cat", "dog"))


@pytest.mark.parametrize("name", ["7.png", "more"])
def test_a_broken_link_among_images_is_an_unreadable_one(root: Path, name: str) -> None:
    put(root, "cat", "dog")
    (root / "cat" / name).symlink_to(f"{NOWHERE}/{name}")
    message = f"cat/{name} cannot be read as an image: it is a link to {NOWHERE}"
    with pytest.raises(DataError, match=message):
        central(root)
    data = central(root, on_error="skip")
    assert (data.num_skipped, sum(sizes(data))) == (1, 8)
    with pytest.raises(DataError, match=message):
        opened("image_folder", root, IMAGES, path=".")
    assert set(surveyed("image_folder", root, path=".").unreadable) == {f"cat/{name}"}
    # A file that takes its place is decoded.
    (root / "cat" / name).unlink()
    put_image(root / "other.png", 5)
    (root / "other.png").rename(root / "cat" / name)
    assert sum(sizes(central(root, on_error="skip"))) == 9


def test_a_survey_without_a_task_begins_at_the_first_readable_image(
    root: Path,
) -> None:
    put(root, "cat", "dog", count=1)
    for number in range(8):
        (root / "cat" / f"bad{number}.png").write_bytes(b"")
    data = surveyed("image_folder", root, path=".")
    assert data.task.spec.image_shape == (4, 4, 3)
    assert len(data.unreadable) == 8


def put_phone_photos(root: Path, count: int = 8) -> None:
    for number in range(count):
        (root / "dog" / f"IMG_{number}.HEIC").write_bytes(b"\0\0\0\x18ftypheic")


def test_formats_that_nothing_reads_are_a_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(root, "cat", "dog")
    put_phone_photos(root)
    expected = r"8 files are left out, .*\(\.heic\).*: 8 of 12 of 'dog'; convert them"
    check = check_site(surveyed("image_folder", root, IMAGES, path="."))
    (warning,) = (text for text in check.warnings if "left out" in text)
    assert re.search(expected, warning)
    data = opened("image_folder", root, IMAGES, path=".")
    assert (len(classes(data)), data.num_ignored) == (8, 8)
    assert re.search(expected, caplog.text)
    caplog.clear()
    assert open_source(root, (4, 4, 3), ("cat", "dog")).num_ignored == 8
    assert re.search(expected, caplog.text)
    with pytest.raises(
        DataError, match=r"(?s)8 examples .*Pillow reads no \.heic, unlike"
    ):
        central(root)
    caplog.clear()
    assert central(root, on_error="skip").num_skipped == 8
    assert re.search(expected, caplog.text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("a.NEF", "1 of 5 of 'dog'"),
        ("IM1 IM2 IM3", r"\(no suffix\).* 3 of 7 of 'dog'"),
        ("a.jpg_large b.jpg_large c.jpg_large", r"\(\.jpg_large\)"),
        # A few notes, and what belongs to an image.
        ("notes.txt labels.csv", None),
        ("dog0.HEIC dog1.txt dog1.png.xmp dog2.json dog3.xml", None),
    ],
)
def test_what_is_worth_a_warning(root: Path, files: str, expected: str | None) -> None:
    put(root, "cat", "dog")
    for name in files.split():
        (root / "dog" / name).write_text("")
    warnings = surveyed("image_folder", root, path=".").warnings
    if expected is None:
        assert warnings == ()
    else:
        assert re.search(expected, warnings[0])


def test_clutter_is_no_image_no_class_and_no_client(root: Path) -> None:
    put(root, "cat", "dog")
    put_clutter(root)
    data = opened("image_folder", root, IMAGES, path=".")
    assert (len(classes(data)), data.num_ignored, data.warnings) == (8, 0, ())
    assert sum(sizes(central(root))) == 8
    assert open_source(root, (4, 4, 3), ("cat", "dog")).num_ignored == 0


def test_clutter_beside_clients_splits_and_domains(root: Path) -> None:
    put(root / "users", "zoe/cat", "adam/dog")
    put(root / "splits", "train/cat", "test/cat")
    put_clutter(root)
    data = central(root / "users")
    assert (data.client_names, data.class_names) == (("adam", "zoe"), ("cat", "dog"))
    assert sizes(central(root / "splits")) == (4, 4)
    data = DomainFolderSettings(root=str(root / "users")).load()
    assert data.domain_names == ("adam", "zoe")
    found = opened("image_folder", root, IMAGES, path="splits")
    assert len(split_of(found)) == 8


def test_a_loose_photo_is_in_the_wrong_place_whatever_its_format(root: Path) -> None:
    put(root, "cat", "dog")
    Image.new("RGB", (4, 4)).save(root / "loose.png")
    (root / "loose.png").rename(root / "loose.HEIC")
    with pytest.raises(DataError, match=r"loose\.HEIC is a file where a class folder"):
        central(root)
    with pytest.raises(DataError, match=r"loose\.HEIC is a file where a class folder"):
        opened("image_folder", root, IMAGES, path=".")
