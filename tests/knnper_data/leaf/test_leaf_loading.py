import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.data import numpy_files
from knnper.data.characters import ALPHABET, NUM_TOKENS, UNKNOWN
from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.leaf import LeafSettings, LeafTextSettings
from knnper.errors import DataError
from tests.knnper_data.leaf.leaf_files import UserData, images, write

ADA: UserData = {"ada": (images(*range(10)), list(range(10)))}
BOB: UserData = {"bob": (images(90, 91), [60, 61])}
TEST: UserData = {"bob": (images(200), [1]), "ada": (images(201), [2])}
WINDOW = "x" * 80


def femnist(root: Path, **chosen: Any) -> Dataset:
    return LeafSettings(root=str(root), **chosen).load()


def owned(split: LabelledArrays) -> list[tuple[int, int, int]]:
    """Return client, grey and label of each image."""
    assert split.client_ids is not None
    greys = split.images[:, 5, 5, 0].tolist()
    return list(
        zip(split.client_ids.tolist(), greys, split.labels.tolist(), strict=True)
    )


def test_leafs_own_split_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "train" / "b.json", BOB)
    write(tmp_path / "train" / "a.json", ADA)
    write(tmp_path / "test" / "a.json", TEST)
    found = femnist(tmp_path, min_samples=9)
    grades = [(0, grey, grey) for grey in range(10)]
    assert owned(found.train) == [*grades, (1, 90, 60), (1, 91, 61)]
    assert owned(found.test) == [(1, 200, 1), (0, 201, 2)]
    assert found.spec.image_shape == (28, 28, 1)
    assert found.spec.num_classes == 62
    assert found.class_names[9:11] == ("9", "A")
    assert found.class_names[35:37] == ("Z", "a")
    assert found.spec.mean == pytest.approx([(sum(range(10)) + 90 + 91) / 12 / 255])


def test_all_data_is_divided_user_by_user(tmp_path: Path) -> None:
    write(tmp_path / "all_data" / "a.json", ADA)
    write(tmp_path / "all_data" / "b.json", BOB)
    found = femnist(tmp_path, split="time", test_fraction=0.3)
    kept = [(0, grey, grey) for grey in range(7)]
    assert owned(found.train) == [*kept, (1, 90, 60)]
    assert owned(found.test) == [(0, 7, 7), (0, 8, 8), (0, 9, 9), (1, 91, 61)]


def test_users_with_few_samples(tmp_path: Path) -> None:
    data: UserData = {"none": ([], []), "one": (images(7), [8]), **ADA}
    write(tmp_path / "all_data" / "a.json", data)
    found, without = femnist(tmp_path), femnist(tmp_path, min_samples=2)
    assert owned(found.train)[0] == (0, 7, 8)
    assert {client for client, _, _ in owned(found.test)} == {1}
    assert {client for client, _, _ in owned(without.train)} == {0}


def test_the_cache_knows_what_decides(tmp_path: Path, cache_folder: Path) -> None:
    def entries() -> int:
        return sum(path.is_dir() for path in cache_folder.iterdir())

    write(tmp_path / "whole" / "a.json", ADA)
    for seed in (0, 1, 1):
        femnist(tmp_path / "whole", seed=seed)
    assert entries() == 2
    write(tmp_path / "divided" / "train" / "a.json", ADA)
    write(tmp_path / "divided" / "test" / "a.json", TEST)
    for seed in (0, 1):
        femnist(tmp_path / "divided", seed=seed)
    assert entries() == 3


def test_a_user_in_two_files(tmp_path: Path) -> None:
    write(tmp_path / "all_data" / "a.json", ADA)
    write(tmp_path / "all_data" / "b.json", {"ada": ([], []), **BOB})
    assert len(femnist(tmp_path).train) == 10
    write(tmp_path / "all_data" / "copy.json", ADA)
    with pytest.raises(DataError, match=r"'ada' is in .*a\.json and again in .*copy"):
        femnist(tmp_path)


@pytest.mark.parametrize(
    ("data", "chosen", "message"),
    [
        ({}, {}, "no user_data"),
        ({"one": (images(1), [1])}, {}, "no samples for test"),
        (ADA, {"test_fraction": 0.0}, "no samples for test"),
        (ADA, {"min_samples": 11}, "no samples for train, test"),
    ],
)
def test_nothing_to_train_or_test_on(
    tmp_path: Path, data: UserData, chosen: dict[str, Any], message: str
) -> None:
    write(tmp_path / "a.json", data)
    with pytest.raises(DataError, match=message):
        femnist(tmp_path, **chosen)


def test_shakespeare(tmp_path: Path) -> None:
    text = "To be, or not to be: that is the question.\n" * 3
    windows = [text[at : at + 80] for at in range(5)]
    following = [text[at + 80] for at in range(5)]
    data: UserData = {
        "HAMLET_HAMLET": (windows, following),
        "HAMLET_ΓΕΡΤΡΟΥΔΗ": ([WINDOW, "é" * 80], ["}", "☃"]),
    }
    write(tmp_path / "data" / "all_data" / "all_data.json", data)
    settings = LeafTextSettings(root=str(tmp_path), test_fraction=0.5)
    found = settings.load()
    assert found.spec.dtype == "token"
    assert found.spec.image_shape == (1, 1, 80)
    assert found.spec.num_classes == len(found.class_names) == NUM_TOKENS
    assert found.spec.mean == found.spec.std == ()
    tokens = found.train.images[0].ravel().tolist()
    assert "".join(ALPHABET[token] for token in tokens) == windows[0]
    assert [ALPHABET[label] for label in found.train.labels] == [*following[:2], "}"]
    assert found.test.images[-1].ravel().tolist() == [UNKNOWN] * 80
    assert found.test.labels[-1] == UNKNOWN
    np.testing.assert_array_equal(found.test.client_ids, [0, 0, 0, 1])
    assert found.client_names == ("HAMLET_HAMLET", "HAMLET_ΓΕΡΤΡΟΥΔΗ")


def test_roles_in_another_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def read(labels: str) -> Dataset:
        data: UserData = {"ada": ([WINDOW] * len(labels), list(labels))}
        write(tmp_path / "all_data" / "a.json", data)
        return LeafTextSettings(root=str(tmp_path)).load()

    with pytest.raises(DataError, match=r"60% of the characters .* 'д', 'ж';"):
        read("джддtd tдж")
    assert read("tdtdдtdtdt").train.labels.tolist()[4] == UNKNOWN
    assert "10% of the characters are outside of the alphabet of 80" in caplog.text


@pytest.mark.integration
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numpy_files, "_BYTES_AT_ONCE", 8 * 28 * 28)
    greys = np.arange(40) * 6

    def peak(num_users: int) -> int:
        root = tmp_path / str(num_users)
        user = (images(*greys), [1] * len(greys))
        write(root / "a.json", {str(number): user for number in range(num_users)})
        tracemalloc.start()
        assert len(femnist(root).train) == num_users * 32
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)
    few, many = peak(3), peak(24)
    assert many < 1.2 * few


def test_settings_without_effect_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "train" / "a.json", ADA)
    write(tmp_path / "test" / "a.json", TEST)
    femnist(tmp_path)
    assert not caplog.records
    femnist(tmp_path, min_samples=9, split="time", seed=3)
    assert "data.split, data.seed, data.min_samples has no effect" in caplog.text
    assert "test_fraction" not in caplog.text
