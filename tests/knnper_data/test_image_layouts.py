"""Image folders as people have them: without splits, by client, with odd files."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from knnper.data.dividing import mark_alike
from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.image_folders import ImageFolderSettings
from knnper.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "own"  # beside the cache


def put(root: Path, name: str, value: int, mode: str = "RGB") -> None:
    """Save an image that is ``value`` in every channel of 8 bits."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (value,) * 3).convert(mode).save(path)


def values(part: LabelledArrays) -> list[int]:
    return sorted(part.images[:, 0, 0, 0].tolist())


def loaded(root: Path, **settings: object) -> Dataset:
    return ImageFolderSettings(root=str(root), **settings).load()  # type: ignore[arg-type]


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=60),
    st.floats(0.01, 0.99),
    st.integers(0, 3),
)
def test_a_part_has_its_share_of_each_kind(
    kinds: list[str], fraction: float, seed: int
) -> None:
    names = [f"{number}" for number in range(len(kinds))]
    marks = mark_alike(names, kinds, fraction, seed)
    assert sum(marks) == min(int(fraction * len(kinds) + 0.5), len(kinds) - 1)
    marked = Counter(kind for kind, mark in zip(kinds, marks, strict=True) if mark)
    for kind, count in Counter(kinds).items():
        assert abs(marked[kind] - fraction * count) <= 1.5
    # The order in which they are listed says nothing.
    turned = mark_alike(names[::-1], kinds[::-1], fraction, seed)
    assert turned[::-1] == marks


def test_a_folder_of_classes(root: Path) -> None:
    for number in range(10):
        put(root, f"cat/{number}.png", number)
    for number in range(5):
        put(root, f"dog/{number}.png", 100 + number)
    put(root, "emu/only.png", 200)
    (root / "labels.csv").write_text("what lies beside the classes")
    data = loaded(root)
    assert data.class_names == ("cat", "dog", "emu")
    # A fifth of each class; the only image of one is trained on.
    assert np.bincount(data.test.labels).tolist() == [2, 1]
    assert np.bincount(data.train.labels).tolist() == [8, 4, 1]
    both = values(data.train) + values(data.test)
    assert sorted(both) == [*range(10), *range(100, 105), 200]
    for part in (data.train, data.test):
        np.testing.assert_array_equal(part.images[:, 0, 0, 0] // 100, part.labels)
    assert values(loaded(root).test) == values(data.test)
    assert values(loaded(root, seed=1).test) != values(data.test)
    # A class of a split's name is one, where it is said to be.
    put(root, "train/a.png", 250)
    assert len(loaded(root, layout="classes").class_names) == 4


def test_a_folder_for_each_client(root: Path) -> None:
    for user, start in (("zoe", 0), ("adam", 100)):
        for number in range(5):
            put(root, f"{user}/cat/{number}.png", start + number)
            put(root, f"{user}/dog/{number}.png", start + 50 + number)
    put(root, "bob/cat/1.png", 200)
    (root / "bob" / "notes.txt").write_text("what lies beside the classes")
    data = loaded(root)
    assert (data.class_names, data.client_names) == (
        ("cat", "dog"),
        ("adam", "bob", "zoe"),
    )
    assert data.train.client_ids is not None
    assert data.test.client_ids is not None
    # A fifth of each client, one of each of its classes.
    assert np.bincount(data.test.client_ids).tolist() == [2, 0, 2]
    assert np.bincount(data.test.labels).tolist() == [2, 2]
    owner = np.array([2, 0, 1])  # of the values from 0, from 100 and from 200
    for part in (data.train, data.test):
        found = owner[part.images[:, 0, 0, 0] // 100]
        np.testing.assert_array_equal(found, part.client_ids)
    with pytest.raises(DataError, match="client_separator '_', expected only one of"):
        loaded(root, client_separator="_")


def test_clients_below_splits(root: Path) -> None:
    for split, start in (("train", 0), ("test", 100)):
        put(root, f"{split}/zoe/cat/1.png", start)
        put(root, f"{split}/adam/dog/1.png", start + 1)
    data = loaded(root)
    assert data.client_names == ("adam", "zoe")
    assert data.train.images[:, 0, 0, 0].tolist() == [1, 0]
    np.testing.assert_array_equal(data.test.client_ids, [0, 1])
    put(root, "test/adam/emu/1.png", 5)
    with pytest.raises(DataError, match=r"test has classes that no .* has: emu"):
        loaded(root)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_images_of_mixed_modes(root: Path, mode: str) -> None:
    suffix = {"CMYK": "tif", "YCbCr": "tif"}.get(mode, "png")
    for number in range(3):
        put(root, f"cat/{number}.png", 255)
        put(root, f"dog/{number}.{suffix}", 255, mode)
    data = loaded(root, test_fraction=0.4)
    assert set(values(data.train)) == set(values(data.test)) == {255}


def test_files_that_cannot_be_read(root: Path) -> None:
    for number in range(10):
        put(root, f"train/cat/{number}.png", number)
        put(root, f"train/dog/{number}.png", 100 + number)
        put(root, f"test/dog/{number}.png", 200 + number)
    (root / "train/cat/0.png").write_bytes(b"")
    whole = (root / "train/dog/7.png").read_bytes()
    (root / "train/dog/7.png").write_bytes(whole[:-25])
    (root / "train/dog/notes.txt").write_text("blurred: 3")
    Image.new("I;16", (4, 4)).save(root / "test/dog/4.png")
    with pytest.raises(DataError) as refused:
        loaded(root)
    listed = str(refused.value).splitlines()
    assert listed[0] == "4 examples cannot be read:"
    named = ("cat/0.png", "dog/7.png", "dog/notes.txt", "test/dog/4.png")
    assert all(name in line for name, line in zip(named, listed[1:], strict=True))
    assert "16-bit" in listed[-1]

    for _ in range(2):  # made, and from the cache
        data = loaded(root, on_error="skip")
        assert data.num_skipped == 4
        trained = [*range(1, 10), *(n for n in range(100, 110) if n != 107)]
        assert values(data.train) == trained
        assert values(data.test) == [n for n in range(200, 210) if n != 204]
        np.testing.assert_array_equal(
            data.train.images[:, 0, 0, 0] // 100, data.train.labels
        )
    # Settings that do not fit are no damaged files.
    Image.new("RGB", (9, 9)).save(root / "test/dog/3.png")
    with pytest.raises(DataError, match=r"3\.png is 9x9 .*data\.image_size"):
        loaded(root, on_error="skip")
    for file in (root / "test/dog").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match="no test image can be read"):
        loaded(root, on_error="skip")
