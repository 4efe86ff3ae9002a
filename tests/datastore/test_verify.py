"""A sound store is sound, and every damage is found."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from knnper.datastore.database import content_checksum
from knnper.datastore.erasure import Secrets, prove_absence, stored_rows
from knnper.datastore.examples import (
    Selection,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreSpec,
)
from knnper.datastore.index import GraphSettings
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import (
    DATABASE,
    configure_store,
    create_store,
    open_rows,
    open_store,
)
from knnper.datastore.verify import delete_examples, verify
from tests.datastore.damaged_store import write_flipped
from tests.datastore.small_store import IMAGE_DIM, small_store, some


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store with a saved graph."""
    folder = tmp_path / "store"
    with small_store(folder, StoreSettings(index=GraphSettings())) as store:
        store.save()
    return folder


def change(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
        connection.execute(statement, values)


def findings(folder: Path) -> list[str]:
    return [one.what for one in verify(folder).findings]


def test_it_stays_sound_whatever_is_done(folder: Path) -> None:
    with open_store(folder, writable=True) as store:
        store.add(some(10, 1, "more"))
        assert findings(folder) == []
        store.delete(Selection(labels=(1,)))
        assert findings(folder) == []
        store.reembed(lambda inputs: inputs.flatten(1).float(), "second")
        assert findings(folder) == []
        assert verify(folder).num_rows == 3 * len(store)
    assert findings(folder) == []


def test_a_store_without_inputs_or_examples_is_sound(tmp_path: Path) -> None:
    create_store(tmp_path / "store", StoreSpec(3), IMAGE_DIM, "first").close()
    assert findings(tmp_path / "store") == []


SMALL = "1 examples: external id, label or time of arrival is not what was written: 4"
DAMAGES: list[tuple[str, str, str]] = [
    (
        "UPDATE inputs SET input = zeroblob(48) WHERE id = 7",
        "1 examples: inputs is not what was written: 7",
        "--id 7",
    ),
    (
        "UPDATE embeddings_1 SET checksum = 1 WHERE id IN (3, 4)",
        "2 examples: embeddings_1 is not what was written: 3, 4",
        "--id 3 --id 4",
    ),
    (
        "UPDATE examples SET label = 2 WHERE id = 1",
        "1 examples: inputs is not what was written: 1",
        "delete",
    ),
    ("DELETE FROM embeddings_1 WHERE id = 9", "embeddings_1 lacks a row: 9", "delete"),
    ("DELETE FROM inputs WHERE id < 3", "2 examples: inputs lacks a row: 1, 2", "--id"),
    ("DELETE FROM examples WHERE id = 5", "inputs has rows of no example: 5", "backup"),
    ("UPDATE store SET num_removed = 7", "its classes and its capacity", "restore"),
    ("UPDATE examples SET arrival = 1000.5 WHERE id = 4", SMALL, "--id 4"),
    ("UPDATE examples SET external_id = 'file/99' WHERE id = 4", SMALL, "--id 4"),
    (
        "UPDATE examples SET external_id = CAST(x'ff' AS TEXT) WHERE id = 4",
        SMALL,
        "--id 4",
    ),
    ("UPDATE versions SET fingerprint = 'firsu'", "written: firsu", "restore"),
    ("DROP TABLE embeddings_1", "do not agree: embeddings_1", "restore"),
]


@pytest.mark.parametrize(("statement", "what", "mend"), DAMAGES)
def test_damage_is_found(folder: Path, statement: str, what: str, mend: str) -> None:
    change(folder, statement)
    first = verify(folder).findings[0]
    assert what in first.what
    assert mend in first.mend


def test_an_example_without_a_trace_is_missed(folder: Path) -> None:
    for table in ("examples", "inputs", "embeddings_1"):
        change(folder, f"DELETE FROM {table} WHERE id = 9")
    (found,) = verify(folder).findings
    assert "examples are missing" in found.what
    assert "salvage" in found.mend
    with pytest.raises(StoreDamagedError, match="examples are missing"):
        open_store(folder)


def test_an_erasure_that_was_cut_short_is_found(folder: Path) -> None:
    with open_rows(folder, writable=True) as (_, rows), rows.writing() as (_, row):
        row.erasing = 1
    (found,) = verify(folder).findings
    assert "an erasure was cut short" in found.what
    assert "compact" in found.mend
    assert verify(folder).saving is None


def test_numbers_that_are_not_finite_are_found(folder: Path) -> None:
    vector = np.full(IMAGE_DIM, np.nan, np.float32).tobytes()
    # With a checksum that fits: they were written like this.
    value = content_checksum("embeddings_1", 2, 1, vector)
    change(
        folder,
        "UPDATE embeddings_1 SET vector = ?, checksum = ? WHERE id = 2",
        vector,
        value,
    )
    assert findings(folder) == ["1 examples: embeddings_1 is not what was written: 2"]


def test_a_broken_database_is_found(folder: Path) -> None:
    path = folder / DATABASE
    content = bytearray(path.read_bytes())
    content[-16384:] = b"\7" * 16384
    path.write_bytes(content)
    verdict = verify(folder)
    assert "damaged" in verdict.findings[0].what
    assert "backup" in verdict.findings[0].mend
    path.write_bytes(b"no database " * 1000)
    assert "damaged" in findings(folder)[0]


@pytest.mark.parametrize(
    "assignment",
    [
        "spec = '{'",
        "spec = CAST(x'7bff' AS TEXT)",
        "spec = replace(spec, 'cat', 'bat')",
        "settings = replace(settings, 'null', '7')",
    ],
)
def test_an_unreadable_description_is_found(folder: Path, assignment: str) -> None:
    change(folder, f"UPDATE store SET {assignment}")
    (found,) = findings(folder)
    assert "its classes and its capacity, is not what was written" in found
    assert "pydantic" not in found


def test_a_changed_index_is_found(folder: Path) -> None:
    file, *_ = (folder / "index").glob("*.index")
    content = file.read_bytes()
    write_flipped(file, content, 4 * len(content))
    assert findings(folder) == ["the saved index is not what was written"]
    assert "knnper store compact" in verify(folder).findings[0].mend
    with open_store(folder, writable=True) as store:
        store.compact()
    assert findings(folder) == []


def test_an_index_of_other_vectors_is_found(folder: Path) -> None:
    vector = np.ones(IMAGE_DIM, np.float32).tobytes()
    change(
        folder,
        "UPDATE embeddings_1 SET vector = ?, checksum = ? WHERE id = 2",
        vector,
        content_checksum("embeddings_1", 2, 1, vector),
    )
    assert findings(folder) == [
        "the saved index has other embeddings than the database: 2"
    ]


def outdated(manifest: dict[str, object]) -> None:
    manifest["token"] = "of another save"


def of_another_library(manifest: dict[str, object]) -> None:
    manifest["faiss"] = "0.0.1"


@pytest.mark.parametrize("edit", [outdated, of_another_library])
def test_an_index_that_is_not_used_is_no_fault(
    folder: Path, edit: Callable[[dict[str, object]], None]
) -> None:
    path = folder / "index" / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    assert findings(folder) == []


def test_stray_files_are_found(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "index" / "copy.bak").write_text("mine")
    (folder / "index" / "of_a_save_cut_short.index").write_text("")
    assert findings(folder) == [
        f"{folder / 'index' / 'copy.bak'} is not the store's",
        f"{folder / 'notes.txt'} is not the store's",
    ]


def test_nothing_is_changed(folder: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        verify(folder.parent)
    configure_store(folder, StoreSettings(capacity=40))
    verdict = verify(folder)
    assert verdict.findings == ()
    assert (verdict.num_examples, verdict.num_rows) == (30, 60)
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    verify(folder)
    after = {path: path.read_bytes() for path in before}
    assert after == before


def change_unindexed(folder: Path, statement: str) -> None:
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
    change_unindexed(folder, "UPDATE embeddings_1 SET checksum = 1 WHERE id = 3")
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
    change_unindexed(folder, "UPDATE examples SET label = 7 WHERE id = 3")
    delete_examples(folder, np.array([3]))
    assert verify(folder).findings == ()
    assert num_seen(folder) == [10, 10, 10]


def test_another_writer_is_respected(folder: Path) -> None:
    with open_store(folder, writable=True), pytest.raises(StoreBusyError):
        delete_examples(folder, np.array([3]))
