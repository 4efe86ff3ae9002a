import logging
import os
import resource
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from knnper.server.link import superlink as database
from knnper.server.link.setup import keep_to_owner
from knnper.server.link.superlink import LogFile, allow_descriptors


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    paths = (folder, *folder.rglob("*"))
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}


def test_an_open_state_folder_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    (state / "runs").mkdir(parents=True)
    (state / "superlink.db").write_text("keys")
    (state / "program").write_text("run")
    (state / "program").chmod(0o755)
    outside = tmp_path / "outside"
    outside.write_text("others'")
    (state / "link").symlink_to(outside)
    keep_to_owner(state)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644
    (state / "link").unlink()
    expected = {"state": 0o700, "runs": 0o700, "superlink.db": 0o600, "program": 0o700}
    assert modes(state) == expected
    assert "get at 4 files and folders" in caplog.text
    caplog.clear()
    keep_to_owner(state)
    assert caplog.text == ""


def test_a_log_is_read_on_by_whole_lines(tmp_path: Path) -> None:
    log, position = LogFile(tmp_path / "warnings.log", largest=20), 0
    assert log.read_from(position) == ([], 0)
    steps = {"one\ntw": ["one"], "o\n": ["two"], "": [], "é\n\nx\n": ["é", "", "x"]}
    for text, expected in steps.items():
        with log.path.open("a") as writer:
            writer.write(text)
        lines, position = log.read_from(position)
        assert lines == expected
    with log.path.open("a") as writer:
        writer.write("a line too many\n")
    log.put_aside()
    log.path.write_text("anew\n")
    assert log.read_from(position) == (["anew"], 5)


def test_a_log_is_put_aside_while_it_is_written(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "superlink.log", largest=10, num_kept=2)
    log.put_aside()
    with log.path.open("ab", buffering=0) as writer:
        for text in (b"first line", b", longer", b"second line", b"third line!"):
            writer.write(text)
            log.put_aside()
        writer.write(b"last")
    parts = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert parts == {
        "superlink.log": b"last",
        "superlink.log.1": b"third line!",
        "superlink.log.2": b"second line",
    }


def test_too_few_descriptors_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0])
    )
    with caplog.at_level(logging.WARNING):
        allow_descriptors(1000)
        assert (limits[0], caplog.text) == (1024, "")
        allow_descriptors(4100)
    assert "may have 1024 files and connections open" in caplog.text


# Flower makes its tables with a tool that is newer than its settings for it.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")

UNSIGNED = 2**63 + 5

LARGE = 8_000_000


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database as Flower makes it, which takes seconds."""
    path = tmp_path_factory.mktemp("flower") / "superlink.db"
    store = SqlObjectStore(str(path))
    store.initialize()
    assert store._engine is not None
    store._engine.dispose()
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    path = Path(shutil.copy(template, tmp_path))
    database.prepare(path)
    return path


@pytest.fixture
def flower(path: Path) -> Iterator[sqlite3.Connection]:
    """Write as Flower does."""
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


def add_run(
    flower: sqlite3.Connection, run_id: int, *, finished: datetime | None = None
) -> None:
    """Add a run with code, a message, its reply, an object and a log."""
    now = datetime.now(UTC).isoformat(sep=" ")
    ended = None if finished is None else finished.isoformat(sep=" ")
    signed = run_id - 2**64 if run_id >= 2**63 else run_id
    flower.execute(
        "INSERT INTO task (task_id, type, run_id, pending_at, finished_at) "
        "VALUES (?, 'flwr-serverapp', ?, ?, ?)",
        [run_id % 1000, signed, now, ended],
    )
    flower.execute(
        "INSERT INTO run (run_id, primary_task_id, fab_hash) VALUES (?, ?, ?)",
        [signed, run_id % 1000, f"fab {run_id}"],
    )
    flower.execute("INSERT INTO fab VALUES (?, ?, '')", [f"fab {run_id}", b"code"])
    flower.execute(
        "INSERT INTO message_ins (message_id, run_id) VALUES (?, ?)",
        [f"ins {run_id}", signed],
    )
    flower.execute(
        "INSERT INTO message_res (message_id, run_id, reply_to_message_id) "
        "VALUES (?, ?, ?)",
        [f"res {run_id}", signed, f"ins {run_id}"],
    )
    name = f"object {run_id}"
    flower.execute(
        "INSERT INTO objects (object_id, content) VALUES (?, ?)", [name, bytes(LARGE)]
    )
    flower.execute("INSERT INTO run_objects VALUES (?, ?)", [signed, name])
    flower.execute("INSERT INTO task_logs VALUES (1, ?, 'line')", [run_id % 1000])


def rows(flower: sqlite3.Connection, table: str) -> int:
    return int(flower.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def size(path: Path) -> int:
    files = (Path(f"{path}{end}") for end in ("", "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def test_finished_runs_that_left_something(
    path: Path, flower: sqlite3.Connection
) -> None:
    assert database.left_behind(path) == []
    add_run(flower, 3)
    add_run(flower, UNSIGNED, finished=datetime.now(UTC))
    assert database.left_behind(path) == [UNSIGNED]
    flower.execute("DELETE FROM message_ins")
    assert database.left_behind(path) == [UNSIGNED]
    flower.execute("DELETE FROM run_objects")
    assert database.left_behind(path) == []


def test_the_file_shrinks_while_it_is_open(
    path: Path, flower: sqlite3.Connection
) -> None:
    add_run(flower, 3, finished=datetime.now(UTC))
    assert size(path) > LARGE
    flower.execute("DELETE FROM objects")
    database.shrink(path)
    assert size(path) < LARGE / 8
    assert flower.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_run_under_way_keeps_its_room(path: Path, flower: sqlite3.Connection) -> None:
    add_run(flower, 3)
    flower.execute("DELETE FROM objects")
    database.shrink(path)
    assert size(path) > LARGE


def test_a_database_of_an_earlier_version_shrinks_at_the_start(
    template: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(template, tmp_path))
    connection = sqlite3.connect(path, isolation_level=None)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    add_run(connection, 3)
    connection.execute("DELETE FROM objects")
    connection.close()
    database.prepare(path)
    assert size(path) < LARGE / 8
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert rows(connection, "message_ins") == 1
    connection.close()


def test_code_old_logs_and_replies_to_nothing_go_at_the_start(
    path: Path, flower: sqlite3.Connection
) -> None:
    add_run(flower, 3)
    add_run(flower, 4, finished=datetime.now(UTC))
    add_run(flower, 5, finished=datetime.now(UTC) - timedelta(days=31))
    flower.execute(
        "INSERT INTO fab VALUES ('shown', 'code', ''), ('nobody''s', 'code', '')"
    )
    flower.execute(
        "INSERT INTO federation_app (federation_id, app_id, fab_hash, app_type, "
        "added_by, added_at, updated_at) VALUES ('', '', 'shown', '', '', '', '')"
    )
    flower.execute("DELETE FROM message_ins WHERE run_id = 4")
    database.prepare(path)
    assert rows(flower, "message_res") == 2
    kept = {name for (name,) in flower.execute("SELECT fab_hash FROM fab")}
    assert kept == {"fab 3", "shown"}
    logs = {task for (task,) in flower.execute("SELECT task_id FROM task_logs")}
    assert logs == {3, 4}
    assert rows(flower, "run") == 3


def test_what_is_no_database_of_flowers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("CREATE TABLE run (number INTEGER)")
    connection.execute("INSERT INTO run VALUES (1)")
    with pytest.raises(sqlite3.OperationalError):
        database.prepare(path)
    assert rows(connection, "run") == 1
    connection.close()
