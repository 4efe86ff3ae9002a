"""Examples are deleted whatever state they are in."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from knnper.datastore.erasure import Secrets, prove_absence, stored_rows
from knnper.datastore.examples import StoreBusyError, StoreDamagedError
from knnper.datastore.store import DATABASE, open_store
from knnper.datastore.verify import delete_examples, verify
from tests.datastore.care.store_cases import small_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    small_store(folder).close()
    return folder


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        connection.execute(statement)
        connection.commit()
    shutil.rmtree(folder / "index", ignore_errors=True)


def num_seen(folder: Path) -> list[int]:
    with open_store(folder) as store:
        seen: list[int] = store._rows.head().stream.num_seen.tolist()
        return seen


def test_sound_examples_are_deleted(folder: Path) -> None:
    delete_examples(folder, np.array([3, 4, 99]))
    with open_store(folder) as store:
        assert store.contents().ids.tolist() == [1, 2, *range(5, 31)]
    assert num_seen(folder) == [9, 10, 9]


def test_a_damaged_embedding_can_be_deleted(folder: Path) -> None:
    change(folder, "UPDATE embeddings_1 SET checksum = 1 WHERE id = 3")
    with pytest.raises(StoreDamagedError, match="example 3"):
        open_store(folder)
    secrets = Secrets(stored_rows(folder, np.array([3])))
    assert "--id 3" in verify(folder).findings[0].mend
    delete_examples(folder, np.array([3]))
    assert verify(folder).findings == ()
    assert prove_absence(folder, secrets).holds
    with open_store(folder) as store:
        assert len(store) == 29
    assert num_seen(folder) == [10, 10, 9]


def test_a_label_that_is_none_can_be_deleted(folder: Path) -> None:
    change(folder, "UPDATE examples SET label = 7 WHERE id = 3")
    delete_examples(folder, np.array([3]))
    assert verify(folder).findings == ()
    assert num_seen(folder) == [10, 10, 10]


def test_another_writer_is_respected(folder: Path) -> None:
    with open_store(folder, writable=True), pytest.raises(StoreBusyError):
        delete_examples(folder, np.array([3]))
