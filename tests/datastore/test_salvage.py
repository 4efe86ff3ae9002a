"""What is intact is saved, what is not is named, and the damaged store stays."""

import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from knnper.datastore.database import PAGE_BYTES, Log
from knnper.datastore.examples import (
    Selection,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
)
from knnper.datastore.journal import ACKNOWLEDGED, frames
from knnper.datastore.store import DATABASE, Store, open_store
from knnper.datastore.verify import Salvage, salvage, verify, what_is_intact
from tests.datastore.damaged_store import (
    COUNT,
    FRAME,
    a_history,
    left_by_a_kill,
    log_in,
    state,
    write_flipped,
)
from tests.datastore.small_store import small_store, some

ALL = Salvage(COUNT, (), 0, 0)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    small_store(folder).close()
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_by_a_kill(tmp_path_factory.mktemp("killed") / "store", a_history)


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(folder: Path) -> dict[int, tuple[object, ...]]:
    """Return all that a store holds, by id."""
    with open_store(folder) as store:
        held = store.contents()
        columns: list[Iterator[object]] = [
            iter(held.labels.tolist()),
            iter(held.arrivals.tolist()),
            iter(store.external_ids(held.ids)),
            (row.tobytes() for row in store.vectors(held.ids).numpy()),
            (row.tobytes() for row in store.inputs(held.ids).numpy()),
        ]
        return dict(zip(held.ids.tolist(), zip(*columns, strict=True), strict=True))


def check(folder: Path, whole: dict[int, tuple[object, ...]]) -> Salvage:
    """Return what is saved; fail if it is not what it says, or anything is changed."""
    target, before = folder.with_name("saved"), files_of(folder)
    shutil.rmtree(target, ignore_errors=True)
    saved = salvage(folder, target)
    assert files_of(folder) == before
    assert what_is_intact(folder) == saved
    found = rows_of(target)
    assert len(found) == saved.num_saved
    assert found == {one: whole[one] for one in found}
    assert set(found).isdisjoint(saved.lost)
    assert verify(target).findings == ()
    left = {path.name for path in folder.parent.iterdir()} - {folder.name, "saved"}
    assert not any(name.startswith(".") for name in left)
    return saved


def test_a_sound_store_is_saved_as_a_whole(killed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "store"))
    whole = rows_of(killed)
    assert check(folder, whole) == Salvage(len(whole), (), 0, 0)
    assert state(tmp_path / "saved") == state(killed)
    with open_store(tmp_path / "saved", writable=True) as store:
        assert store.add(some(1)).ids.tolist() == [max(whole) + 1]


def test_whatever_frame_of_the_log_is_damaged(killed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(killed, tmp_path / "store"))
    content, whole = log_in(folder).read_bytes(), rows_of(killed)
    num_frames = len(list(frames(log_in(folder))))
    num_lost = []
    # The header, and the page of each frame of the log.
    for place in [17, *range(32 + 1000, 32 + num_frames * FRAME, 3 * FRAME)]:
        write_flipped(log_in(folder), content, 8 * place)
        saved = check(folder, whole)
        assert saved.num_saved + len(saved.lost) == len(whole)
        assert saved.num_missing == 0
        num_lost.append(len(saved.lost))
    # Most pages are in the log again, later.
    assert num_lost.count(0) > len(num_lost) // 2
    assert max(num_lost) <= 1


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


def test_damaged_examples_are_named(closed: Path) -> None:
    whole = rows_of(closed)
    with closing(sqlite3.connect(closed / DATABASE)) as connection, connection:
        connection.execute("UPDATE inputs SET input = zeroblob(48) WHERE id = 7")
        connection.execute("UPDATE embeddings_1 SET vector = x'00' WHERE id = 8")
        connection.execute("UPDATE examples SET label = 'x' WHERE id = 9")
        connection.execute("UPDATE examples SET arrival = 1 WHERE id = 10")
        connection.execute("DELETE FROM inputs WHERE id = 11")
        for table in ("examples", "inputs", "embeddings_1"):
            connection.execute(f"DELETE FROM {table} WHERE id = 12")
    saved = check(closed, whole)
    assert saved == Salvage(COUNT - 6, (7, 8, 9, 10, 11), 1, 0)
    assert verify(closed).saving == saved


def test_a_page_that_is_gone_costs_what_was_on_it(tmp_path: Path) -> None:
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
            num_lost.append(len(whole) - what_is_intact(folder).num_saved)
        except StoreDamagedError:
            num_lost.append(len(whole))
    # Pages that lead to others are not needed; two say what the store is.
    assert num_lost.count(0) > 3
    assert num_lost.count(len(whole)) == 2
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


def test_the_page_that_says_where_the_tables_are_is_not_needed(closed: Path) -> None:
    whole, content = rows_of(closed), (closed / DATABASE).read_bytes()
    (closed / DATABASE).write_bytes(b"\7" * PAGE_BYTES + content[PAGE_BYTES:])
    assert check(closed, whole) == ALL


def test_what_was_deleted_does_not_come_back(closed: Path) -> None:
    def work(store: Store) -> None:
        store.add(some(3, 1, "more"))
        store.delete(Selection(ids=(2, 31)))
        store.add(some(1, 2, "again"))

    left_by_a_kill(closed, work)
    whole = rows_of(closed)
    log_in(closed).unlink()
    saved = check(closed, whole)
    assert saved.num_missing == 1


def test_what_is_being_erased_does_not_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    small_store(folder, count=2000).close()
    kept = tuple(range(1, 1900))

    def killed(log: Log) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(store: Store) -> None:
        with pytest.MonkeyPatch.context() as patched:
            # After the database was written anew, and only in the log.
            patched.setattr(Log, "empty", killed)
            store.delete(Selection(ids=kept))

    left_by_a_kill(folder, work)
    whole = rows_of(folder)
    assert len(whole) == 101
    assert check(folder, whole) == Salvage(101, (), 0, 0)


def test_without_the_witness_nothing_more_is_missing(closed: Path) -> None:
    whole = rows_of(closed)
    (closed / ACKNOWLEDGED).unlink()
    assert check(closed, whole) == ALL


def test_what_cannot_be_saved_is_said(closed: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        salvage(tmp_path / "none", tmp_path / "new")
    with pytest.raises(StoreError, match="not empty"):
        salvage(closed, tmp_path)
    with (
        open_store(closed, writable=True),
        pytest.raises(StoreBusyError, match="writes to"),
    ):
        salvage(closed, tmp_path / "new")
    with closing(sqlite3.connect(closed / DATABASE)) as connection, connection:
        connection.execute("UPDATE store SET spec = '{}'")
    with pytest.raises(StoreDamagedError, match=r"nothing .* backup"):
        salvage(closed, tmp_path / "new")
    assert verify(closed).saving is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
