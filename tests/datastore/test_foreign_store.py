"""A store from somebody else: nothing behind a link is touched, no pipe waited for."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from knnper.datastore.examples import InputLayout, StoreDamagedError, StoreError
from knnper.datastore.index import FactorySettings, FlatSettings
from knnper.datastore.journal import ACKNOWLEDGED
from knnper.datastore.local_memory import DESCRIPTION, STORE, LocalMemory
from knnper.datastore.policy import StoreSettings
from knnper.datastore.search import MANIFEST
from knnper.datastore.store import (
    DATABASE,
    INDEX,
    LOCK,
    configure_store,
    open_store,
    read_identity,
)
from knnper.datastore.tables import StoreRow
from knnper.datastore.transfer import export_store, summarize
from knnper.datastore.verify import delete_examples, salvage, verify
from knnper.files import ForeignFileError
from tests.datastore.small_store import IMAGES, small_store
from tests.foreign_files import PLANTS, content_of, make_victim, plant

pytestmark = pytest.mark.usefixtures("deadline")
ENTRIES = (
    *(DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", ACKNOWLEDGED, LOCK, INDEX),
    f"{INDEX}/{MANIFEST}",
)


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "identity": read_identity,
    "info": summarize,
    "verify": verify,
    "open to read": open_store,
    "open to write": lambda folder: open_store(folder, writable=True),
    "delete": lambda folder: delete_examples(folder, np.array([1])),
    "configure": lambda folder: configure_store(folder, StoreSettings()),
    "export": lambda folder: export_store(folder, folder.with_name("out.npz")),
    "salvage": lambda folder: salvage(folder, folder.with_name("saved")),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "store"
    with small_store(folder) as store:
        store.save()
    return folder


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_store_with_something_foreign_is_refused(
    original: Path, entry: str, kind: str, tmp_path: Path
) -> None:
    folder, victim = tmp_path / "store", make_victim(tmp_path / "victim")
    shutil.copytree(original, folder)
    plant(kind, folder / entry, victim)
    before = content_of(victim)
    for operation in OPERATIONS.values():
        with pytest.raises(StoreError, match=f"{entry} is a (link|pipe|socket)"):
            operation(folder)
    assert content_of(victim) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "victim"]


def test_a_store_may_be_reached_by_a_link(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "disk" / "store")
    (tmp_path / "store").symlink_to(tmp_path / "disk" / "store")
    delete_examples(tmp_path / "store", np.array([1]))
    assert verify(tmp_path / "store").findings == ()
    with open_store(tmp_path / "disk" / "store") as store:
        assert len(store) == 29


@pytest.mark.parametrize("entry", [DESCRIPTION, STORE, f"{STORE}/{INDEX}"])
@pytest.mark.parametrize("kind", ["link_to_folder", "link_to_file", "pipe"])
def test_a_memory_with_something_foreign_is_refused(
    entry: str, kind: str, tmp_path: Path
) -> None:
    victim = make_victim(tmp_path / "victim")
    LocalMemory().fit([[0.0], [1.0]], [0, 1]).save(tmp_path / "memory")
    plant(kind, tmp_path / "memory" / entry, victim)
    before = content_of(victim)
    with pytest.raises(ForeignFileError, match=f"{entry} is a (link|pipe)"):
        LocalMemory.load(tmp_path / "memory")
    assert content_of(victim) == before


# Sizes that a store claims are compared with its files


def forge(folder: Path, **columns: str) -> None:
    """Write what a store says of itself, with the right checksum."""
    path = folder / DATABASE
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        row = StoreRow.read(connection, path)
        replace(row, **columns).write(connection)  # type: ignore[arg-type]


def test_memory_for_inputs_is_taken_when_they_are_as_large(
    original: Path, tmp_path: Path
) -> None:
    shutil.copytree(original, tmp_path / "store")
    spec = replace(IMAGES, input=InputLayout((10**6, 10**6, 10**3)))
    forge(tmp_path / "store", spec=json.dumps(asdict(spec)))
    with (
        open_store(tmp_path / "store") as store,
        pytest.raises(StoreDamagedError, match="example 1 in table inputs is not what"),
    ):
        store.inputs(store.contents().ids)


def test_a_store_has_as_many_classes_as_it_has_counted(
    original: Path, tmp_path: Path
) -> None:
    shutil.copytree(original, tmp_path / "store")
    spec = replace(IMAGES, num_classes=10**12, class_names=())
    forge(tmp_path / "store", spec=json.dumps(asdict(spec)))
    with pytest.raises(StoreDamagedError, match="its policy has counted 3"):
        open_store(tmp_path / "store")


def test_a_saved_index_takes_no_more_memory_than_its_file(tmp_path: Path) -> None:
    settings, file = FactorySettings("SQfp16"), tmp_path / "x.index"
    vectors = np.ones((8, 4), np.float32)
    settings.build(4, np.arange(1, 9), vectors).write(file)
    content = bytearray(file.read_bytes())
    # The number of bytes of the vectors stands before them.
    codes = vectors.astype(np.float16).tobytes()
    place = content.rindex(codes) - 8
    assert int.from_bytes(content[place : place + 8], "little") == len(codes)
    content[place : place + 8] = (2**36).to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(StoreDamagedError, match="not an index that can be read"):
        settings.read(file, 4)
    settings.build(4, np.arange(1, 9), vectors).write(file)
    assert len(settings.read(file, 4)) == 8


@pytest.mark.parametrize("place", [8, 16], ids=["number of vectors", "their size"])
def test_a_flat_index_takes_no_more_memory_than_its_file(
    tmp_path: Path, place: int
) -> None:
    settings, file = FlatSettings(), tmp_path / "x.index"
    settings.build(4, np.arange(1, 9), np.ones((8, 4), np.float32)).write(file)
    content = bytearray(file.read_bytes())
    content[place : place + 8] = (2**40).to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(StoreDamagedError, match="rebuild it from the vectors"):
        settings.read(file, 4)
