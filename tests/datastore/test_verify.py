import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from knnper.datastore.connection import PAGE_BYTES, WriteAheadLog
from knnper.datastore.examples import (
    Selection,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreSpec,
)
from knnper.datastore.journal import ACKNOWLEDGED
from knnper.datastore.policy import StoreSettings
from knnper.datastore.store import (
    DATABASE,
    Store,
    configure_store,
    create_store,
    open_rows,
    open_store,
)
from knnper.datastore.tables import blob_checksum
from knnper.datastore.verify import (
    Salvage,
    delete_examples,
    readable_part,
    salvage,
    verify,
)
from tests.datastore.damaged_store import (
    COUNT,
    FRAME,
    a_history,
    left_by_a_kill,
    log_in,
    rows_of,
    write_flipped,
)
from tests.datastore.erased_bytes import files_with, stored_bytes
from tests.datastore.index_kinds import GRAPH
from tests.datastore.small_store import IMAGE_DIM, small_store, some


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store with a saved graph."""
    folder = tmp_path / "store"
    with small_store(folder, StoreSettings(index=GRAPH)) as store:
        store.save()
    return folder


TABLES = ("examples", "inputs", "embeddings_1")


def change(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as connection, connection:
        connection.execute(statement, values)


def findings(folder: Path) -> list[str]:
    return [finding.problem for finding in verify(folder).findings]


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
        "UPDATE embeddings_1 SET checksum = 1 WHERE id IN (3, 4)",
        "2 examples: embeddings_1 is not what was written: 3, 4",
        "--id 3 --id 4",
    ),
    ("UPDATE examples SET label = 2 WHERE id = 1", "inputs is not what was", "delete"),
    ("DELETE FROM embeddings_1 WHERE id = 9", "embeddings_1 lacks a row: 9", "delete"),
    ("DELETE FROM inputs WHERE id < 3", "2 examples: inputs lacks a row: 1, 2", "--id"),
    (
        "DELETE FROM examples WHERE id = 5",
        "inputs has rows without an example: 5",
        "backup",
    ),
    ("UPDATE store SET num_removed = 7", "its classes and capacity", "restore"),
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


@pytest.mark.parametrize(("statement", "problem", "fix"), DAMAGES)
def test_damage_is_found(folder: Path, statement: str, problem: str, fix: str) -> None:
    change(folder, statement)
    first = verify(folder).findings[0]
    assert problem in first.problem
    assert fix in first.fix


def test_an_example_without_a_trace_is_missed(folder: Path) -> None:
    for table in TABLES:
        change(folder, f"DELETE FROM {table} WHERE id = 9")
    (finding,) = verify(folder).findings
    assert "examples are missing" in finding.problem
    assert "rewrite" in finding.fix
    with pytest.raises(StoreDamagedError, match="examples are missing"):
        open_store(folder)


def test_an_erasure_that_was_cut_short_is_found(folder: Path) -> None:
    with open_rows(folder, writable=True) as (_, rows), rows.writing() as (_, row):
        row.erasing = 1
    (finding,) = verify(folder).findings
    assert "an erasure was interrupted" in finding.problem
    assert "rewrite" in finding.fix
    assert verify(folder).salvage is None


def set_vector(folder: Path, vector: bytes) -> None:
    """Change an embedding, with a checksum that fits: as if written like this."""
    statement = "UPDATE embeddings_1 SET vector = ?, checksum = ? WHERE id = 2"
    change(folder, statement, vector, blob_checksum("embeddings_1", 2, 1, vector))


def test_numbers_that_are_not_finite_are_found(folder: Path) -> None:
    vector = np.full(IMAGE_DIM, np.nan, np.float32).tobytes()
    set_vector(folder, vector)
    assert findings(folder) == ["1 examples: embeddings_1 is not what was written: 2"]


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
    (problem,) = findings(folder)
    assert "its classes and capacity, is not what was written" in problem
    assert "pydantic" not in problem


def test_verify_finds_other_vectors_in_the_flat_index(tmp_path: Path) -> None:
    folder = tmp_path / "flat"
    with small_store(folder) as store:
        store.save()
    set_vector(folder, np.ones(IMAGE_DIM, np.float32).tobytes())
    expected = "the saved index has other embeddings than the database: 2"
    assert findings(folder) == [expected]


def test_an_index_that_is_not_used_is_no_fault(folder: Path) -> None:
    path = folder / "index" / "manifest.json"
    manifest = json.loads(path.read_text())
    for edit in ({"token": "of another save"}, {"faiss": "0.0.1"}):
        path.write_text(json.dumps(manifest | edit))
        assert findings(folder) == []


def test_stray_files_are_found(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "index" / "copy.bak").write_text("mine")
    (folder / "index" / "of_a_save_cut_short.index").write_text("")
    assert findings(folder) == [
        f"{folder / 'index' / 'copy.bak'} does not belong to the store",
        f"{folder / 'notes.txt'} does not belong to the store",
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


def num_seen(folder: Path) -> list[int]:
    with open_store(folder) as store:
        seen: list[int] = store._rows.state().stream.num_seen.tolist()
        return seen


def test_sound_examples_are_deleted(folder: Path) -> None:
    delete_examples(folder, np.array([3, 4, 99]))
    with open_store(folder) as store:
        assert store.contents().ids.tolist() == [1, 2, *range(5, 31)]
    assert num_seen(folder) == [9, 10, 9]


def test_a_damaged_embedding_can_be_deleted(folder: Path) -> None:
    change(folder, "UPDATE embeddings_1 SET checksum = 1 WHERE id = 3")
    shutil.rmtree(folder / "index")
    with pytest.raises(StoreDamagedError, match="example 3"):
        open_store(folder)
    secrets = stored_bytes(folder, np.array([3]))
    assert "--id 3" in verify(folder).findings[0].fix
    delete_examples(folder, np.array([3]))
    assert verify(folder).findings == ()
    assert files_with(folder, secrets) == set()
    with open_store(folder) as store:
        assert len(store) == 29
    assert num_seen(folder) == [10, 10, 9]


def test_a_label_that_is_none_can_be_deleted(folder: Path) -> None:
    change(folder, "UPDATE examples SET label = 7 WHERE id = 3")
    shutil.rmtree(folder / "index")
    delete_examples(folder, np.array([3]))
    assert verify(folder).findings == ()
    assert num_seen(folder) == [10, 10, 10]


def test_another_writer_is_respected(folder: Path) -> None:
    with open_store(folder, writable=True), pytest.raises(StoreBusyError):
        delete_examples(folder, np.array([3]))


ALL = Salvage(COUNT, (), 0, 0)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_by_a_kill(tmp_path_factory.mktemp("killed") / "store", a_history)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(folder: Path, whole: dict[int, tuple[object, ...]]) -> Salvage:
    """Return what is saved; fail if it is not what it says, or anything is changed."""
    target, before = folder.with_name("saved"), files_of(folder)
    shutil.rmtree(target, ignore_errors=True)
    saved = salvage(folder, target)
    assert files_of(folder) == before
    assert readable_part(folder) == saved
    rows = rows_of(target)
    assert len(rows) == saved.num_saved
    assert rows == {example_id: whole[example_id] for example_id in rows}
    assert set(rows).isdisjoint(saved.lost)
    assert verify(target).findings == ()
    left = {path.name for path in folder.parent.iterdir()} - {folder.name, "saved"}
    assert not any(name.startswith(".") for name in left)
    return saved


def test_a_sound_store_is_saved_as_a_whole(killed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "store"))
    whole = rows_of(killed)
    assert check(folder, whole) == Salvage(len(whole), (), 0, 0)
    with open_store(tmp_path / "saved", writable=True) as store:
        assert store.add(some(1)).ids.tolist() == [max(whole) + 1]


def test_salvage_counts_what_a_damaged_log_hides(killed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "store"))
    content, whole = log_in(folder).read_bytes(), rows_of(killed)
    missing = []
    for place in (17, *range(32 + 1000, len(content), 3 * FRAME)):
        write_flipped(log_in(folder), content, 8 * place)
        saved = check(folder, whole)
        assert saved.num_saved + saved.num_missing == len(whole)
        assert saved.lost == ()
        assert bool(saved.num_missing) <= bool(saved.num_changes_missing)
        missing.append(saved.num_missing)
    assert max(missing) > 0


def test_what_lies_in_no_file_is_counted(killed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "store"))
    log_in(folder).unlink()
    whole = rows_of(killed)
    saved = check(folder, whole)
    assert saved.num_saved + saved.num_missing == len(whole)
    assert saved.num_missing
    assert saved.num_changes_missing
    with open_store(tmp_path / "saved", writable=True) as store:
        assert store.add(some(1)).ids.tolist() == [max(whole) + 1]


def test_damaged_examples_are_named(folder: Path) -> None:
    whole = rows_of(folder)
    for statement in (
        "UPDATE inputs SET input = zeroblob(48) WHERE id = 7",
        "UPDATE embeddings_1 SET vector = x'00' WHERE id = 8",
        "UPDATE examples SET label = 'x' WHERE id = 9",
        "UPDATE examples SET arrival = 1 WHERE id = 10",
        "DELETE FROM inputs WHERE id = 11",
        *(f"DELETE FROM {table} WHERE id = 12" for table in TABLES),
    ):
        change(folder, statement)
    saved = check(folder, whole)
    assert saved == Salvage(COUNT - 6, (7, 8, 9, 10, 11), 1, 0)
    assert verify(folder).salvage == saved


def test_missing_page_loses_only_its_rows(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    small_store(folder, count=1000).close()
    whole, path = rows_of(folder), folder / DATABASE
    content = path.read_bytes()
    num_lost = []
    for number in range(1, len(content) // PAGE_BYTES):
        page = slice(number * PAGE_BYTES, (number + 1) * PAGE_BYTES)
        changed = bytearray(content)
        changed[page] = b"\7" * PAGE_BYTES
        path.write_bytes(changed)
        try:
            num_lost.append(len(whole) - readable_part(folder).num_saved)
        except StoreDamagedError:
            num_lost.append(len(whole))
    assert sorted(num_lost)[len(num_lost) // 2] < len(whole) // 2


def test_half_a_database_is_half_saved(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with small_store(folder, count=10) as store:
        for number in range(20):
            store.add(some(100, number))
    whole, content = rows_of(folder), (folder / DATABASE).read_bytes()
    (folder / DATABASE).write_bytes(content[: len(content) * 2 // 3 + 77])
    saved = check(folder, whole)
    assert 500 < saved.num_saved < 2000
    assert saved.num_saved + len(saved.lost) + saved.num_missing == len(whole)


def test_salvage_needs_the_page_of_the_tables(folder: Path, tmp_path: Path) -> None:
    content = (folder / DATABASE).read_bytes()
    (folder / DATABASE).write_bytes(b"\7" * PAGE_BYTES + content[PAGE_BYTES:])
    with pytest.raises(StoreDamagedError, match="backup"):
        salvage(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_salvage_needs_no_acknowledgement(folder: Path) -> None:
    whole = rows_of(folder)
    (folder / ACKNOWLEDGED).unlink()
    assert check(folder, whole) == ALL


def test_what_was_deleted_does_not_come_back(folder: Path) -> None:
    def work(store: Store) -> None:
        store.add(some(3, 1, "more"))
        store.delete(Selection(ids=(2, 31)))
        store.add(some(1, 2, "again"))

    left_by_a_kill(folder, work)
    whole = rows_of(folder)
    log_in(folder).unlink()
    saved = check(folder, whole)
    assert saved.num_missing == 1


def test_what_is_being_erased_does_not_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    small_store(folder, count=2000).close()
    kept = tuple(range(1, 1900))

    def killed(log: WriteAheadLog) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(store: Store) -> None:
        with pytest.MonkeyPatch.context() as patched:
            # After the database was written anew, and only in the log.
            patched.setattr(WriteAheadLog, "empty", killed)
            store.delete(Selection(ids=kept))

    left_by_a_kill(folder, work)
    whole = rows_of(folder)
    assert len(whole) == 101
    assert check(folder, whole) == Salvage(101, (), 0, 0)


def test_unrecoverable_rows_are_reported(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        salvage(tmp_path / "none", tmp_path / "new")
    with pytest.raises(StoreError, match="not empty"):
        salvage(folder, tmp_path)
    with (
        open_store(folder, writable=True),
        pytest.raises(StoreBusyError, match="writes to"),
    ):
        salvage(folder, tmp_path / "new")
    change(folder, "UPDATE store SET spec = '{}'")
    with pytest.raises(StoreDamagedError, match=r"nothing .* backup"):
        salvage(folder, tmp_path / "new")
    assert verify(folder).salvage is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
