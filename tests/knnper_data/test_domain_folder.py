"""ROOT/DOMAIN/CLASS/FILE, with a test split in which all classes count the same."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from knnper.data.dividing import mark_balanced
from knnper.data.domain_folder import DomainFolderSettings
from knnper.data.examples import LabelledArrays
from knnper.errors import DataError
from knnper.seeding import RandomKey

SIZES = {
    ("photo", "dog"): 12,
    ("photo", "cat"): 8,
    ("sketch", "cat"): 4,
    ("sketch", "owl"): 2,
}


def save(file: Path, red: int, size: int = 2) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), (red, 5, 6), dtype=np.uint8)).save(file)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of images whose red tells domain and class."""
    folder = tmp_path / "images"
    for kind, ((domain, label), size) in enumerate(SIZES.items()):
        for number in range(size):
            save(folder / domain / label / f"{number:02}.png", 10 * kind + 1)
    return folder


def rows_of(arrays: LabelledArrays) -> Counter[tuple[int, int, int]]:
    """Return how often each (red, label, domain) occurs."""
    assert arrays.domain_ids is not None
    reds = arrays.images[:, 0, 0, 0].tolist()
    ids = (arrays.labels.tolist(), arrays.domain_ids.tolist())
    return Counter(zip(reds, *ids, strict=True))


def test_each_domain_has_a_balanced_test_split(root: Path) -> None:
    found = DomainFolderSettings(str(root), test_fraction=0.2).load()

    assert found.class_names == ("cat", "dog", "owl")
    assert found.domain_names == ("photo", "sketch")
    assert found.train.client_ids is None
    # A fifth of 20 photos and of 6 sketches, of two classes each: 2 and 1 of a class.
    assert rows_of(found.test) == {
        (1, 1, 0): 2,
        (11, 0, 0): 2,
        (21, 0, 1): 1,
        (31, 2, 1): 1,
    }
    assert rows_of(found.train) == {
        (1, 1, 0): 10,
        (11, 0, 0): 6,
        (21, 0, 1): 3,
        (31, 2, 1): 1,
    }


@settings(max_examples=50, deadline=None)
@given(
    kinds=st.lists(st.sampled_from("abc"), min_size=1, max_size=40),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 1000),
)
def test_of_every_class_the_same_number_or_half(
    kinds: list[str], fraction: float, seed: int
) -> None:
    key = RandomKey(seed)
    chosen = mark_balanced(kinds, fraction, key)
    there = Counter(kinds)
    each = max(1, int(fraction * len(kinds) / len(there) + 0.5))
    taken = Counter(np.asarray(kinds)[chosen].tolist())
    assert {kind: taken[kind] for kind in there} == {
        kind: min(each, size // 2) for kind, size in there.items()
    }
    assert np.array_equal(chosen, mark_balanced(kinds, fraction, key))


def test_which_images_depends_on_the_seed() -> None:
    first, second = (mark_balanced(["a"] * 30, 0.5, RandomKey(seed)) for seed in (0, 1))
    assert first.sum() == second.sum() == 15
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("photo/notes.png", r"notes\.png is a file where a class folder"),
        ("list.png", r"list\.png is a file where a domain folder"),
        ("clipart/cat/.hidden", "clipart holds no images"),
        *(
            (f"{one}/cat/a.png", f"/{one}: found the name of a split.*: image_folder")
            for one in ("train", "Test", "val", "validation")
        ),
    ],
)
def test_what_lies_in_the_wrong_place(root: Path, name: str, message: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()
    with pytest.raises(DataError, match=message):
        DomainFolderSettings(str(root)).load()


def test_too_little(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must hold DOMAIN/CLASS/FILE"):
        DomainFolderSettings(str(tmp_path / "nowhere")).load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no domains"):
        DomainFolderSettings(str(tmp_path / "empty")).load()
    for name in ("cat", "dog"):
        save(tmp_path / "few" / "photo" / name / "only.png", 1)
    with pytest.raises(DataError, match=r"no images to test on.* data\.test_fraction"):
        DomainFolderSettings(str(tmp_path / "few")).load()
