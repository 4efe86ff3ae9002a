"""The tables of a store."""

import sqlite3
from collections.abc import Sequence

from datastore.contents import Contents
from datastore.sqlite.row_checksum import row_checksum

APPLICATION_ID = 0x6B4E4E50  # "kNNP"
FORMAT = 1

# Ids and labels are apart from the large columns, so that reading them is cheap.
# The checksum of bytes covers id and label too: it ties a label to what it is the label
# of. Those of the other tables cover what does not change but by `configure`: not the
# state of the policy and of the index.
_TABLES = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    store_id TEXT NOT NULL,
    spec TEXT NOT NULL,
    settings TEXT NOT NULL,
    created REAL NOT NULL,
    active INTEGER NOT NULL,
    previous INTEGER,
    num_removed INTEGER NOT NULL,
    stream TEXT NOT NULL,
    erasing INTEGER NOT NULL,
    index_token TEXT NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE examples (
    id INTEGER PRIMARY KEY,
    external_id TEXT UNIQUE,
    label INTEGER NOT NULL,
    arrival REAL NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE inputs (
    id INTEGER PRIMARY KEY,
    input BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE TABLE versions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    fingerprint TEXT NOT NULL UNIQUE,
    embedding_dim INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
"""


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables that every store has, in an empty database."""
    connection.executescript(_TABLES)


def vectors_table(version: int) -> str:
    """Return the name of the table of one version's embeddings."""
    return f"embeddings_{version:d}"


def create_vectors_table(connection: sqlite3.Connection, version: int) -> None:
    """Make the table of one version's embeddings."""
    connection.execute(
        f"CREATE TABLE {vectors_table(version)} (id INTEGER PRIMARY KEY, "
        "vector BLOB NOT NULL, checksum INTEGER NOT NULL)"
    )


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
    create_vectors_table(connection, number)
    return number
