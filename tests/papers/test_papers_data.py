"""Tiny archives in the layout of the real ones, packed and unpacked."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from knnper.data.characters import encode
from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.image_folders import ImageFolderSettings
from knnper.errors import DataError
from knnper.seeding import RandomKey
from knnper.simulation.partition.pachinko import PachinkoSettings
from knnper.simulation.partition.schemes import PARTITIONS
from papers.data import (
    ArchiveSettings,
    Cifar10Jpeg,
    Cifar100Sheets,
    FemnistByWriter,
    MnistByWriter,
    ShakespeareByRole,
)

pytestmark = pytest.mark.integration

RNG = np.random.default_rng(0)
Read = Callable[..., Dataset]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNNPER_CACHE", str(tmp_path / "cache"))


def pack(folder: Path) -> Path:
    """Return an archive of a folder, below its name as the real ones are."""
    place = folder.with_suffix(".tar.gz")
    with tarfile.open(place, "w:gz") as archive:
        archive.add(folder, folder.name)
    return place


@pytest.fixture(params=["packed", "unpacked"])
def read(request: pytest.FixtureRequest, tmp_path: Path) -> Read:
    """Return what reads ``tmp_path / "files"`` as it is, or as an archive."""

    def load(kind: type[ArchiveSettings], **settings: Any) -> Dataset:
        folder = tmp_path / "files"
        place = pack(folder) if request.param == "packed" else folder
        return kind(path=str(place), **settings).load()

    return load


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def write(path: Path, image: np.ndarray, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)


def owned(part: LabelledArrays, client: int) -> list[int]:
    """Return the labels of a client, in their order."""
    assert part.client_ids is not None
    found: list[int] = part.labels[part.client_ids == client].tolist()
    return found


def test_jpeg_copies_are_what_an_image_folder_makes_of_them(
    read: Read, tmp_path: Path
) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for name in ("cat", "airplane"):
            for number in range(count):
                place = tmp_path / "files" / split / name / f"{number:04d}.jpg"
                write(place, pixels(32, 32, 3))
    found = read(Cifar10Jpeg)
    same = ImageFolderSettings(root=str(tmp_path / "files")).load()
    assert found.class_names == same.class_names == ("airplane", "cat")
    for one, other in ((found.train, same.train), (found.test, same.test)):
        assert np.array_equal(one.images, other.images)
        assert np.array_equal(one.labels, other.labels)


@pytest.fixture
def sheets(tmp_path: Path) -> dict[tuple[str, str], np.ndarray]:
    """Write two sheets of 2 x 3 images and two of one; return images of each."""
    images = {}
    rows = "fine_id,fine,coarse_id,coarse\n1,bee,4,insects\n0,apple,7,fruit\n"
    for split, (height, width) in (("train", (2, 3)), ("test", (1, 1))):
        for name in ("apple", "bee"):
            grid = pixels(height, width, 32, 32, 3)
            sheet = np.block([[[one] for one in row] for row in grid])
            place = tmp_path / "files" / split / f"{name}.webp"
            write(place, sheet, lossless=True)
            images[split, name] = grid.reshape(-1, 32, 32, 3)
    (tmp_path / "files/classes.csv").write_text(rows)
    return images


def test_sheets_are_cut_row_by_row(
    read: Read, sheets: dict[tuple[str, str], np.ndarray]
) -> None:
    found = read(Cifar100Sheets)
    assert found.class_names == ("apple", "bee")
    assert found.coarse_of == (7, 4)
    assert found.train.labels.tolist() == [0] * 6 + [1] * 6
    assert found.test.labels.tolist() == [0, 1]
    for split, part in (("train", found.train), ("test", found.test)):
        expected = np.concatenate([sheets[split, name] for name in ("apple", "bee")])
        assert np.array_equal(part.images, expected)
    pachinko = PARTITIONS["pachinko"].split
    clients = pachinko(found, PachinkoSettings(num_clients=3), RandomKey(0))
    assert [len(one) for one in clients.train] == [4, 4, 4]


def test_a_sheet_that_is_none_is_named(
    tmp_path: Path, sheets: dict[tuple[str, str], np.ndarray]
) -> None:
    assert sheets
    files = tmp_path / "files"
    write(files / "test/bee.webp", pixels(40, 32, 3), lossless=True)
    with pytest.raises(DataError, match=r"test/bee.webp: found a sheet of 32x40"):
        Cifar100Sheets(path=str(files)).load()
    (files / "test/bee.webp").unlink()
    with pytest.raises(DataError, match=r"files: found no test/bee.webp; expected"):
        Cifar100Sheets(path=str(files)).load()


@pytest.fixture
def writers(tmp_path: Path) -> dict[str, Any]:
    """Write images of two writers, the second one's first; return the arrays."""
    arrays: dict[str, Any] = {
        "images": pixels(12, 28, 28),
        "labels": np.arange(12, dtype=np.uint8) % 10,
        "writer": np.array([1] * 5 + [0] * 7, dtype=np.uint16),
        "writer_ids": np.array(["f1_02", "f0_09"]),
        "leaf_test": np.array([0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0], dtype=np.uint8),
    }
    (tmp_path / "files").mkdir()
    np.savez(tmp_path / "files/femnist_by_writer.npz", **arrays)
    of_mnist = {name: arrays[name] for name in ("images", "labels", "writer")}
    np.savez(tmp_path / "files/mnist_by_writer.npz", **of_mnist)
    return arrays


def test_writers_have_the_split_of_leaf(read: Read, writers: dict[str, Any]) -> None:
    found = read(FemnistByWriter)
    assert found.client_names == ("f1_02", "f0_09")
    assert len(found.class_names) == 62
    assert owned(found.train, 0) == [6, 7, 8, 9, 0, 1]
    assert owned(found.train, 1) == [0, 1, 3, 4]
    assert found.test.labels.tolist() == [5, 2]
    assert np.array_equal(found.test.images[..., 0], writers["images"][[5, 2]])
    few = read(FemnistByWriter, min_samples=6)
    assert few.client_names == ("f1_02",)


def test_writers_can_be_divided_otherwise(read: Read, writers: dict[str, Any]) -> None:
    found = read(FemnistByWriter, leaf_split=False, test_fraction=0.4)
    for number, (name, writer) in enumerate((("f1_02", 0), ("f0_09", 1))):
        everything = owned(found.train, number) + owned(found.test, number)
        mine = writers["labels"][writers["writer"] == writer]
        assert sorted(everything) == sorted(mine.tolist()), name
    assert [len(owned(found.test, one)) for one in (0, 1)] == [3, 2]


@pytest.mark.usefixtures("writers")
def test_each_writer_of_mnist_is_tested_on_a_part_of_its_own(read: Read) -> None:
    found = read(MnistByWriter)
    assert found.client_names == ("0", "1")
    assert found.train.images.shape[1:] == (28, 28, 1)
    assert [len(owned(found.train, one)) for one in (0, 1)] == [6, 4]
    assert [len(owned(found.test, one)) for one in (0, 1)] == [1, 1]


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def test_roles_are_split_by_their_lines(read: Read, tmp_path: Path) -> None:
    folder = tmp_path / "files/by_play_and_character"
    folder.mkdir(parents=True)
    # Of ten lines the last one is tested on, and blanks are joined.
    lines = [f"{ALPHABET[number]}   {ALPHABET * 4}" for number in range(10)]
    said = "\n".join(lines) + "\n"
    (folder / "PLAY_LONG.txt").write_text(said)
    (folder / "PLAY_SHORT.txt").write_text("\n".join([*lines[:4], "No."]) + "\n")
    found = read(ShakespeareByRole)
    assert found.client_names == ("PLAY_LONG",)
    tested = f"j {ALPHABET * 4}"
    assert len(found.test.labels) == len(tested) - 80
    assert np.array_equal(found.test.images[0, 0, 0], encode(tested[:80]))
    assert np.array_equal(found.test.labels, encode(tested[80:]))
    trained = " ".join(f"{one} {ALPHABET * 4}" for one in ALPHABET[:9])
    assert np.array_equal(found.train.labels, encode(trained[80:]))
    sparse = read(ShakespeareByRole, stride=7)
    assert np.array_equal(sparse.train.images, found.train.images[::7])


@pytest.mark.parametrize(
    "kind", [Cifar10Jpeg, Cifar100Sheets, MnistByWriter, ShakespeareByRole]
)
def test_what_is_no_archive_is_told(
    kind: type[ArchiveSettings], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="expected the archive of"):
        kind(path=str(tmp_path / "missing.tar")).load()
    (tmp_path / "damaged.tar").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"damaged.tar cannot be read"):
        kind(path=str(tmp_path / "damaged.tar")).load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"found no .*; expected the archive"):
        kind(path=str(pack(tmp_path / "empty"))).load()


def test_damaged_arrays_are_told(tmp_path: Path) -> None:
    (tmp_path / "mnist_by_writer.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(DataError, match=r"mnist_by_writer.npz cannot be read"):
        MnistByWriter(path=str(tmp_path)).load()
