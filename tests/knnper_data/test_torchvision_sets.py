import pickle  # noqa: TID251 - the official CIFAR files are pickles
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.config.errors import DataError
from knnper.config.torchvision_import import import_torchvision
from knnper.data.cifar100_labels import COARSE_OF
from knnper.data.torchvision_sets import (
    DownloadSettings,
    EmnistSettings,
    load_cifar10,
    load_cifar100,
    load_emnist,
    load_fashion_mnist,
)


@pytest.fixture
def accept_any_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off torchvision's checksums, which only the official files pass."""
    cifar = import_torchvision().datasets.cifar
    monkeypatch.setattr(cifar, "check_integrity", lambda path, md5: Path(path).exists())


def pixels_of(count: int, first: int) -> np.ndarray:
    """Return flat images as the official files hold them: channel, row, column."""
    planes = np.arange(3 * 32 * 32).reshape(1, -1) % 200
    return (planes + first + np.arange(count)[:, None]).astype(np.uint8)


def write_pickle(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(content))


def write_cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    for batch in range(5):
        content = {"data": pixels_of(2, 2 * batch), "labels": [batch, 9 - batch]}
        write_pickle(folder / f"data_batch_{batch + 1}", content)
    write_pickle(folder / "test_batch", {"data": pixels_of(1, 50), "labels": [3]})
    names = [f"class {label}" for label in range(10)]
    write_pickle(folder / "batches.meta", {"label_names": names})


def write_idx(file: Path, array: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    file.write_bytes(header + array.astype(np.uint8).tobytes())


def write_idx_pair(folder: Path, prefix: str, labels: list[int]) -> np.ndarray:
    images = np.arange(len(labels) * 28 * 28).reshape(-1, 28, 28) % 251
    write_idx(folder / f"{prefix}-images-idx3-ubyte", images)
    write_idx(folder / f"{prefix}-labels-idx1-ubyte", np.array(labels))
    return images


@pytest.mark.usefixtures("accept_any_files")
def test_cifar10(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    found = load_cifar10(DownloadSettings(root=str(tmp_path)))
    assert found.spec.image_shape == (32, 32, 3)
    assert found.class_names[3] == "class 3"
    assert found.train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert found.test.labels.tolist() == [3]
    expected = pixels_of(1, 50).reshape(3, 32, 32)
    for channel in range(3):
        np.testing.assert_array_equal(
            found.test.images[0, :, :, channel], expected[channel]
        )


@pytest.mark.usefixtures("accept_any_files")
def test_cifar100_has_coarse_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    for split in ("train", "test"):
        content = {"data": pixels_of(2, 0), "fine_labels": [99, 0]}
        write_pickle(folder / split, content)
    names = [f"class {label}" for label in range(100)]
    write_pickle(folder / "meta", {"fine_label_names": names})
    found = load_cifar100(DownloadSettings(root=str(tmp_path)))
    assert found.train.labels.tolist() == [99, 0]
    assert found.spec.num_classes == 100
    assert found.coarse_of == COARSE_OF


def test_coarse_labels_are_the_official_ones() -> None:
    assert np.bincount(COARSE_OF).tolist() == [5] * 20
    members = {
        0: [4, 30, 55, 72, 95],  # beaver, dolphin, otter, seal, whale
        1: [1, 32, 67, 73, 91],  # aquarium fish, flatfish, ray, shark, trout
        2: [54, 62, 70, 82, 92],  # orchid, poppy, rose, sunflower, tulip
        14: [2, 11, 35, 46, 98],  # baby, boy, girl, man, woman
        17: [47, 52, 56, 59, 96],  # maple, oak, palm, pine, willow
    }
    for coarse, fine in members.items():
        assert np.flatnonzero(np.array(COARSE_OF) == coarse).tolist() == fine


def test_fashion_mnist(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    images = write_idx_pair(folder, "train", [0, 9, 4])
    write_idx_pair(folder, "t10k", [8])
    found = load_fashion_mnist(DownloadSettings(root=str(tmp_path)))
    assert found.spec.image_shape == (28, 28, 1)
    assert found.class_names[9] == "Ankle boot"
    assert found.train.labels.tolist() == [0, 9, 4]
    np.testing.assert_array_equal(found.train.images[..., 0], images)


def test_emnist_letters_start_from_zero_and_stand_upright(tmp_path: Path) -> None:
    folder = tmp_path / "EMNIST" / "raw"
    images = write_idx_pair(folder, "emnist-letters-train", [1, 26])
    write_idx_pair(folder, "emnist-letters-test", [2])
    found = load_emnist(EmnistSettings(root=str(tmp_path), split="letters"))
    assert found.class_names == tuple("abcdefghijklmnopqrstuvwxyz")
    assert found.train.labels.tolist() == [0, 25]
    assert found.test.labels.tolist() == [1]
    np.testing.assert_array_equal(found.train.images[..., 0], images.transpose(0, 2, 1))


def test_emnist_balanced(tmp_path: Path) -> None:
    folder = tmp_path / "EMNIST" / "raw"
    write_idx_pair(folder, "emnist-balanced-train", [0, 46])
    write_idx_pair(folder, "emnist-balanced-test", [10])
    found = load_emnist(EmnistSettings(root=str(tmp_path)))
    assert found.spec.num_classes == 47
    assert found.class_names[10] == "A"
    assert found.train.labels.tolist() == [0, 46]


@pytest.mark.parametrize("load", [load_cifar10, load_cifar100, load_fashion_mnist])
def test_nothing_is_downloaded_unasked(
    tmp_path: Path, load: Callable[[DownloadSettings], object]
) -> None:
    with pytest.raises(DataError, match=r"data\.download=true or place"):
        load(DownloadSettings(root=str(tmp_path)))


def test_a_failed_download_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise OSError("no route to host")

    cifar = import_torchvision().datasets.cifar
    monkeypatch.setattr(cifar, "download_and_extract_archive", fail)
    settings = DownloadSettings(root=str(tmp_path / "here"), download=True)
    with pytest.raises(DataError, match="here: no route to host; check the connection"):
        load_cifar10(settings)


def test_damaged_files_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3"):
        write_idx(folder / f"{name}-ubyte", np.zeros((2, 28, 28)))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"no labels in here")
    with pytest.raises(DataError, match="FashionMNIST cannot be read from"):
        load_fashion_mnist(DownloadSettings(root=str(tmp_path)))


def test_the_default_folder_is_in_the_cache(cache_folder: Path) -> None:
    assert DownloadSettings().folder() == cache_folder / "downloads"
