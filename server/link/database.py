"""The SuperLink's database, kept small: all that is done here to a file of Flower's.

What Flower 1.41 removes itself: an instruction and its reply when the run fetches the
reply; their objects when the receiver says that it has them; all messages, objects and
uploads of a run when that is stopped, when its log was followed to the end, or when a
finished run is listed. What stays: everything that a run left behind which nobody
lists; the code of each run ever submitted; its log; and the file's size.

So here finished runs that left something are listed, which has Flower remove it; the
code of finished runs, and logs of long ago, are removed before the SuperLink starts,
when nothing can need them; and free pages are given back while no run is under way.

`tests/server/link/test_database.py` makes a database as the installed Flower does, and
fails when its tables are no longer as is written here.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

_INCREMENTAL = 2
_BUSY_S = 5.0
_LOGS_DAYS = 30
_STEP_PAGES = 2000  # given back at a time: others write in between
_SPARE_BYTES = 1_000_000

_UNFINISHED = (
    "SELECT run.run_id FROM run JOIN task ON task.task_id = run.primary_task_id "
    "WHERE task.finished_at IS NULL"
)
_LEFT_BEHIND = f"""
SELECT run.run_id FROM run WHERE run.run_id NOT IN ({_UNFINISHED}) AND (
    EXISTS (SELECT 1 FROM message_ins WHERE message_ins.run_id = run.run_id)
    OR EXISTS (SELECT 1 FROM run_objects WHERE run_objects.run_id = run.run_id)
    OR EXISTS (
        SELECT 1 FROM object_push_sessions AS one WHERE one.run_id = run.run_id))
"""
_NO_LONGER_NEEDED = (
    # A reply goes with what it answers; nobody looks for one without.
    "DELETE FROM message_res WHERE reply_to_message_id NOT IN "
    "(SELECT message_id FROM message_ins)",
    f"""DELETE FROM fab WHERE fab_hash NOT IN
    (SELECT fab_hash FROM run WHERE fab_hash IS NOT NULL AND run_id IN ({_UNFINISHED}))
    AND fab_hash NOT IN (SELECT fab_hash FROM federation_app)
    AND fab_hash NOT IN (SELECT fab_hash FROM task
    WHERE fab_hash IS NOT NULL AND finished_at IS NULL)""",
)
_OLD_LOGS = (
    "DELETE FROM task_logs WHERE task_id IN "
    "(SELECT task_id FROM task WHERE finished_at < ?)"
)


def prepare(path: Path) -> None:
    """Make ready a database that nobody has open: new, or of an earlier start.

    Raises
    ------
    sqlite3.Error
        If it is no database, or not as Flower's of this version.
    """
    with _opened(path) as database:
        if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _NO_LONGER_NEEDED:
                database.execute(statement)
            since = datetime.now(UTC) - timedelta(days=_LOGS_DAYS)
            database.execute(_OLD_LOGS, [since.isoformat(sep=" ")])
        if _number(database, "auto_vacuum") != _INCREMENTAL:
            # Takes effect with the whole file written anew: once.
            database.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            database.execute("VACUUM")
        _give_back(database)


def left_behind(path: Path) -> list[int]:
    """Return finished runs of which messages, objects or uploads are left."""
    with _opened(path) as database:
        # Flower's ids are unsigned, SQLite's numbers are not.
        return [run_id % 2**64 for (run_id,) in database.execute(_LEFT_BEHIND)]


def shrink(path: Path) -> None:
    """Give free pages back, unless a run is under way: it would need them again."""
    with _opened(path) as database:
        if not database.execute(_UNFINISHED).fetchone():
            _give_back(database)


def _give_back(database: sqlite3.Connection) -> None:
    wal = Path(f"{_file(database)}-wal")
    spare = _number(database, "freelist_count") * _number(database, "page_size")
    written = wal.stat().st_size if wal.exists() else 0
    if max(spare, written) < _SPARE_BYTES:
        return
    for _ in range(_number(database, "freelist_count") // _STEP_PAGES + 1):
        # With execute, Python takes the first step of it alone: one page.
        database.executescript(f"PRAGMA incremental_vacuum({_STEP_PAGES})")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _file(database: sqlite3.Connection) -> str:
    return str(database.execute("PRAGMA database_list").fetchone()[2])


def _number(database: sqlite3.Connection, pragma: str) -> int:
    return int(database.execute(f"PRAGMA {pragma}").fetchone()[0])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    # Each statement is a transaction of its own.
    database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        yield database
    finally:
        database.close()
