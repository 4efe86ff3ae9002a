import gzip
import hashlib
import pickle  # noqa: TID251 - the official CIFAR files are pickles
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.data.torchvision_sets import (
    COARSE_OF,
    Cifar10Settings,
    Cifar100Settings,
    EmnistSettings,
    FashionMnistSettings,
    MnistSettings,
)
from knnper.errors import DataError
from knnper.process import import_torchvision


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
def test_cifar100_has_coarse_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    for split in ("train", "test"):
        content = {"data": pixels_of(2, 0), "fine_labels": [99, 0]}
        write_pickle(folder / split, content)
    names = [f"class {label}" for label in range(100)]
    write_pickle(folder / "meta", {"fine_label_names": names})
    found = Cifar100Settings(root=str(tmp_path)).load()
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


@pytest.mark.parametrize(
    ("split", "labels", "found", "name"),
    [("letters", [1, 26, 2], [0, 25, 1], "z"), ("balanced", [0, 46, 10], None, "t")],
)
def test_emnist_labels_start_from_zero_and_images_stand_upright(
    tmp_path: Path, split: Any, labels: list[int], found: list[int] | None, name: str
) -> None:
    folder = tmp_path / "EMNIST" / "raw"
    images = write_idx_pair(folder, f"emnist-{split}-train", labels[:2])
    write_idx_pair(folder, f"emnist-{split}-test", labels[2:])
    data = EmnistSettings(root=str(tmp_path), split=split).load()
    seen = [*data.train.labels.tolist(), *data.test.labels.tolist()]
    assert seen == (found or labels)
    assert data.class_names[seen[1]] == name
    np.testing.assert_array_equal(data.train.images[..., 0], images.transpose(0, 2, 1))


LAYOUTS = ["", "raw", "FashionMNIST", "FashionMNIST/raw"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fashion_mnist_in_whatever_way_it_lies_there(
    tmp_path: Path, layout: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    images = write_idx_pair(root / layout, "train", [0, 9, 4])
    if packed:
        pack(root / layout, monkeypatch)
    # Some files may be packed and others not.
    write_idx_pair(root / layout, "t10k", [8])
    before = sorted(root.rglob("*"))
    found = FashionMnistSettings(root=str(root)).load()
    assert found.spec.image_shape == (28, 28, 1)
    assert found.class_names[9] == "Ankle boot"
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([0, 9, 4], [8])
    np.testing.assert_array_equal(found.train.images[..., 0], images)
    assert sorted(root.rglob("*")) == before


def test_mnist_is_found_as_its_relatives_are(tmp_path: Path) -> None:
    images = write_idx_pair(tmp_path / "MNIST" / "raw", "train", [5, 0])
    write_idx_pair(tmp_path / "MNIST" / "raw", "t10k", [7])
    found = MnistSettings(root=str(tmp_path)).load()
    np.testing.assert_array_equal(found.train.images[..., 0], images)
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([5, 0], [7])


def pack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress the files of a folder, and make theirs the official fingerprints."""
    digests = {}
    for path in sorted(folder.iterdir()):
        packed = path.with_name(f"{path.name}.gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        digest = hashlib.md5(packed.read_bytes(), usedforsecurity=False).hexdigest()
        digests[packed.name] = digest
        path.unlink()
    kind = import_torchvision().datasets.FashionMNIST
    resources = [(name, digests.get(name, other)) for name, other in kind.resources]
    monkeypatch.setattr(kind, "resources", resources)


def test_packed_files_that_are_not_the_official_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MNIST has files of the same names; others end too early."""
    kind = import_torchvision().datasets.FashionMNIST
    official = list(kind.resources)
    for prefix in ("train", "t10k"):
        write_idx_pair(tmp_path, prefix, [3])
    pack(tmp_path, monkeypatch)
    packed, settings = list(kind.resources), FashionMnistSettings(root=str(tmp_path))
    monkeypatch.setattr(kind, "resources", official)
    with pytest.raises(DataError, match=r"MD5 8d4fb7e6.*download it again"):
        settings.load()
    cut = tmp_path / "t10k-images-idx3-ubyte.gz"
    cut.write_bytes(cut.read_bytes()[:-20])
    digest = hashlib.md5(cut.read_bytes(), usedforsecurity=False).hexdigest()
    resources = [(name, digest if name == cut.name else one) for name, one in packed]
    monkeypatch.setattr(kind, "resources", resources)
    with pytest.raises(DataError, match=f"{cut} is damaged.*download it again"):
        settings.load()


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("", "archive"),
        ("raw", "unzipped"),
        ("EMNIST", "unpacked"),
        ("EMNIST/raw", "archive"),
    ],
)
def test_emnist_in_whatever_way_it_lies_there(
    tmp_path: Path, layout: str, form: str
) -> None:
    made, folder = tmp_path / "made", tmp_path / "root" / layout
    images = write_idx_pair(made, "emnist-digits-train", [0, 7])
    write_idx_pair(made, "emnist-digits-test", [5])
    write_idx_pair(made, "emnist-mnist-test", [5])
    (folder / "gzip").mkdir(parents=True)
    contents = {path.name: path.read_bytes() for path in made.iterdir()}
    packed = {f"gzip/{name}.gz": gzip.compress(it) for name, it in contents.items()}
    if form == "archive":
        with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
            for name, content in packed.items():
                archive.writestr(name, content)
    else:
        for name, content in (packed if form == "unzipped" else contents).items():
            (folder / name).write_bytes(content)
    found = EmnistSettings(root=str(tmp_path / "root"), split="digits").load()
    assert found.train.labels.tolist() == [0, 7]
    np.testing.assert_array_equal(found.train.images[..., 0], images.transpose(0, 2, 1))


@pytest.mark.usefixtures("accept_any_files")
@pytest.mark.parametrize(
    ("layout", "packed"), [("", True), ("raw", False), ("cifar-10-batches-py", False)]
)
def test_cifar10_in_whatever_way_it_lies_there(
    tmp_path: Path, layout: str, packed: bool
) -> None:
    write_cifar10(tmp_path / "made")
    batches = tmp_path / "made" / "cifar-10-batches-py"
    folder = tmp_path / "root" / layout
    folder.mkdir(parents=True)
    if packed:
        with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
            archive.add(batches, "cifar-10-batches-py")
    else:
        for path in batches.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    found = Cifar10Settings(root=str(tmp_path / "root")).load()
    assert found.spec.image_shape == (32, 32, 3)
    assert found.class_names[3] == "class 3"
    assert found.train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert found.test.labels.tolist() == [3]
    expected = pixels_of(1, 50).reshape(3, 32, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(found.test.images[0], expected)


def test_what_is_missing_is_told_with_where_it_may_be(tmp_path: Path) -> None:
    write_idx_pair(tmp_path / "raw", "train", [1])
    with pytest.raises(DataError) as raised:
        FashionMnistSettings(root=str(tmp_path)).load()
    told = str(raised.value)
    assert "t10k-images-idx3-ubyte" in told.partition("not found")[0]
    assert "train-images-idx3-ubyte" not in told.partition("not found")[0]
    for layout in LAYOUTS:
        assert str(tmp_path / layout) in told
    assert "train-labels-idx1-ubyte.gz" in told.partition("download ")[2]
    kind = import_torchvision().datasets.FashionMNIST
    assert kind.mirrors[0] in told
    assert "data.download=true" in told


def test_a_failed_download_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise OSError("no route to host")

    cifar = import_torchvision().datasets.cifar
    monkeypatch.setattr(cifar, "download_and_extract_archive", fail)
    settings = Cifar10Settings(root=str(tmp_path / "here"), download=True)
    with pytest.raises(DataError, match="here: no route to host; check the connection"):
        settings.load()


def test_damaged_files_are_an_error(cache_folder: Path) -> None:
    """They are in the default folder, in the cache."""
    folder = cache_folder / "downloads" / "FashionMNIST" / "raw"
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3"):
        write_idx(folder / f"{name}-ubyte", np.zeros((2, 28, 28)))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"no labels in here")
    with pytest.raises(DataError, match="FashionMNIST cannot be read from"):
        FashionMnistSettings().load()
