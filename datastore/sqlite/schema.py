"""The tables of a store."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from datastore.contents import Contents
from datastore.errors import StoreError
from datastore.sqlite.checksums import row_checksum
from datastore.sqlite.connection import damaged

APPLICATION_ID = 0x6B4E4E50  # "kNNP"
FORMAT = 2

# Ids and labels are apart from the large columns, so that reading them is cheap.
# The checksum of bytes covers id and label too: it ties a label to what it is the label
# of.
_TABLES = {
    "store": """(
    one INTEGER PRIMARY KEY CHECK (one = 1),
    store_id TEXT NOT NULL,
    created REAL NOT NULL,
    spec TEXT NOT NULL,
    settings TEXT NOT NULL,
    active INTEGER NOT NULL,
    stream TEXT NOT NULL,
    previous INTEGER,
    num_removed INTEGER NOT NULL,
    erasing INTEGER NOT NULL,
    index_token TEXT NOT NULL,
    num_examples INTEGER NOT NULL,
    digest INTEGER NOT NULL,
    num_changes INTEGER NOT NULL,
    checksum INTEGER NOT NULL
)""",
    "examples": """(
    id INTEGER PRIMARY KEY,
    external_id TEXT UNIQUE,
    label INTEGER NOT NULL,
    arrival REAL NOT NULL,
    checksum INTEGER NOT NULL
)""",
    "inputs": """(
    id INTEGER PRIMARY KEY,
    input BLOB NOT NULL,
    checksum INTEGER NOT NULL
)""",
    "versions": """(
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    fingerprint TEXT NOT NULL UNIQUE,
    embedding_dim INTEGER NOT NULL,
    checksum INTEGER NOT NULL
)""",
}
EXAMPLE = "id, external_id, label, arrival"
"""What the checksum of a row of ``examples`` covers."""

_VECTORS = """(
    id INTEGER PRIMARY KEY,
    vector BLOB NOT NULL,
    checksum INTEGER NOT NULL
)"""
_MADE_BY_SQLITE = {
    "sqlite_sequence": "CREATE TABLE sqlite_sequence(name,seq)",
    "sqlite_autoindex_examples_1": None,
    "sqlite_autoindex_versions_1": None,
}


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables that every store has, in an empty database."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    for name, columns in _TABLES.items():
        connection.execute(_statement(name, columns))


def require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database whose tables are not those of a store.

    Raises
    ------
    StoreError
        If another version of this software made them.
    StoreDamagedError
        If they are not what was written.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise damaged(path, "it is a database, but not of a store")
    if 0 < found < FORMAT:
        raise StoreError(
            f"{path} is a store of format {found}, expected {FORMAT}; open it with the "
            "version of this software that wrote it, export it, and add it here"
        )
    if found != FORMAT:
        raise damaged(
            path, f"it is of format {found}, expected {FORMAT}, unless it is newer"
        )
    statements = {name: _statement(name, columns) for name, columns in _TABLES.items()}
    for (number,) in connection.execute("SELECT number FROM versions"):
        name = vectors_table(number)
        statements[name] = _statement(name, _VECTORS)
    present = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
    wrong = {*present.items()} ^ {*statements.items(), *_MADE_BY_SQLITE.items()}
    if wrong:
        names = ", ".join(sorted({str(name) for name, _ in wrong}))
        raise damaged(path, f"tables and versions do not agree: {names}")


def _statement(name: str, columns: str) -> str:
    return f"CREATE TABLE {name} {columns}"


def vectors_table(version: int) -> str:
    """Return the name of the table of one version's embeddings."""
    return f"embeddings_{version:d}"


def insert_examples(
    connection: sqlite3.Connection,
    added: Contents,
    external_ids: Sequence[str | None],
) -> None:
    """Insert examples (n), whose owner has a name for each or none at all."""
    rows = zip(
        added.ids.tolist(),
        external_ids or [None] * len(added),
        added.labels.tolist(),
        added.arrivals.tolist(),
        strict=True,
    )
    connection.executemany(
        "INSERT INTO examples VALUES (?, ?, ?, ?, ?)",
        ((*row, row_checksum(*row)) for row in rows),
    )


def insert_version(
    connection: sqlite3.Connection, fingerprint: str, embedding_dim: int
) -> int:
    """Note a version in the database, make its table, and return its number."""
    cursor = connection.execute(
        "INSERT INTO versions (fingerprint, embedding_dim, checksum) VALUES (?, ?, ?)",
        (fingerprint, embedding_dim, row_checksum(fingerprint, embedding_dim)),
    )
    number = int(cursor.lastrowid or 0)
    connection.execute(_statement(vectors_table(number), _VECTORS))
    return number
