"""A store on disk: one folder for each client.

``store.sqlite3`` (with its log beside it) is the truth, ``index/`` a cache of it, and
``writer.lock`` is held by the one process that writes.
"""

import contextlib
import shutil
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from datastore.core.cache import IndexCache
from datastore.core.live_view import LiveView
from datastore.errors import StoreDamagedError, StoreError
from datastore.examples import StoreSpec
from datastore.policy.base import StreamState
from datastore.settings import StoreSettings, require_settings
from datastore.sqlite.connection import connect, transaction, understood
from datastore.sqlite.row_checksum import read_damaged_text, row_checksum
from datastore.sqlite.rows import SqliteRows
from datastore.sqlite.schema import (
    APPLICATION_ID,
    FORMAT,
    create_tables,
    insert_version,
)
from datastore.sqlite.stream_json import encode_stream
from datastore.sqlite.writer_lock import WriterLock
from datastore.store import Store
from datastore.store_reader import StoreReader, require_model
from knnper.durable_files import sync_folder

DATABASE, INDEX, LOCK = "store.sqlite3", "index", "writer.lock"

_SPEC = TypeAdapter(StoreSpec)
_SETTINGS = TypeAdapter(StoreSettings)


@dataclass(frozen=True)
class Identity:
    """What a store was made for, as its database says.

    Attributes
    ----------
    store_id
        Unlike any other store's.
    created
        Seconds since 1970 (UTC).
    spec, settings
        See `StoreSpec` and `StoreSettings`.
    """

    store_id: str
    created: float
    spec: StoreSpec
    settings: StoreSettings


def create_store(
    folder: Path,
    spec: StoreSpec,
    embedding_dim: int,
    fingerprint: str,
    settings: StoreSettings | None = None,
) -> Store:
    """Return a new, empty store in ``folder``, open to write.

    Parameters
    ----------
    folder
        Must not exist, or be empty.
    spec
        Classes and raw inputs.
    embedding_dim
        p.
    fingerprint
        Of the model that embeds what is added.
    settings
        Policy, capacity and index.

    Raises
    ------
    StoreError
        If the folder holds something.
    ConfigError
        If the settings do not go together.
    """
    settings = settings or StoreSettings()
    require_settings(settings, spec, embedding_dim)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(
            f"{folder} is not empty; expected a new folder for the store. Give another "
            "one, or open the store that is there"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{uuid4().hex}.draft")
    try:
        draft.mkdir()
        _write_database(draft / DATABASE, spec, embedding_dim, fingerprint, settings)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder.parent)
    return open_store(folder, writable=True)


@overload
def open_store(folder: Path, *, fingerprint: str | None = None) -> StoreReader: ...


@overload
def open_store(
    folder: Path, *, writable: Literal[True], fingerprint: str | None = None
) -> Store: ...


def open_store(
    folder: Path, *, writable: bool = False, fingerprint: str | None = None
) -> StoreReader:
    """Return the store in ``folder``.

    Parameters
    ----------
    folder
        As given to `create_store`.
    writable
        Whether it is to be changed, as a `Store`: one process at a time can.
    fingerprint
        Of the model that embeds the queries; None does not ask.

    Raises
    ------
    StoreError
        If there is no store.
    StoreBusyError
        If another process writes.
    StoreMismatchError
        If another model embedded the store.
    StoreDamagedError
        If the files are not what was written.
    """
    require_database(folder)
    with contextlib.ExitStack() as opened:
        if writable:
            opened.callback(WriterLock(folder / LOCK).release)
        identity = read_identity(folder)
        rows = SqliteRows(folder / DATABASE, identity.spec.input, writable=writable)
        opened.callback(rows.close)
        cache = IndexCache(folder / INDEX, rows)
        if writable:
            _tidy_up(rows, cache)
        live = LiveView(rows, cache, identity.settings.index)
        require_model(live.head.active.fingerprint, fingerprint)
        return (Store if writable else StoreReader)(
            rows,
            live,
            identity.spec,
            identity.settings,
            fingerprint=fingerprint,
            resources=opened.pop_all(),
        )


def read_identity(folder: Path) -> Identity:
    """Return what the store in ``folder`` was made for.

    Raises
    ------
    StoreError
        If there is none, or another version of this software made it.
    """
    require_database(folder)
    path = folder / DATABASE
    connection = connect(path, writable=False)
    with contextlib.closing(connection), understood(path):
        _require_format(connection, path)
        read_damaged_text(connection)
        row = connection.execute(
            "SELECT store_id, created, spec, settings, checksum FROM store"
        ).fetchone()
    try:
        spec, settings = _SPEC.validate_json(row[2]), _SETTINGS.validate_json(row[3])
    except ValidationError as error:
        raise _damaged_identity(path) from error
    if row_checksum(*row[:4]) != row[4]:
        raise _damaged_identity(path)
    return Identity(row[0], row[1], spec, settings)


def require_database(folder: Path) -> None:
    """Refuse a folder without a store.

    Raises
    ------
    StoreError
        If there is none.
    """
    if not (folder / DATABASE).is_file():
        raise StoreError(
            f"{folder} holds no store: {DATABASE} is missing. Give the folder that was "
            "created for the client, or create a store in it"
        )


def configure_store(folder: Path, settings: StoreSettings) -> None:
    """Change the settings of the store in ``folder``.

    An index of another kind is built when the store is opened next.

    Raises
    ------
    StoreError
        If more is stored than the new settings allow.
    StoreBusyError
        If a process writes to the store.
    """
    with open_store(folder, writable=True) as store:
        require_settings(settings, store.spec, store.embedding_dim)
        most = settings.most_examples(store.spec, store.embedding_dim)
        if most is not None and most < len(store):
            raise StoreError(
                f"found room for {most} examples in the new settings, expected at "
                f"least the {len(store)} that are stored; delete some first"
            )
        database = folder / DATABASE
        text = _SETTINGS.dump_json(settings).decode()
        with (
            contextlib.closing(connect(database, writable=True)) as connection,
            transaction(connection, database, writing=True),
        ):
            row = connection.execute(
                "SELECT store_id, created, spec FROM store"
            ).fetchone()
            connection.execute(
                "UPDATE store SET settings = ?, checksum = ?",
                (text, row_checksum(*row, text)),
            )


def _tidy_up(rows: SqliteRows, cache: IndexCache) -> None:
    """Finish what a writer that was killed had begun."""
    if rows.is_erasing():
        cache.clear()
        rows.erase_removed()
    cache.remove_leftovers()


def _write_database(
    path: Path,
    spec: StoreSpec,
    embedding_dim: int,
    fingerprint: str,
    settings: StoreSettings,
) -> None:
    with contextlib.closing(connect(path, writable=True)) as connection:
        create_tables(connection)
        with transaction(connection, path, writing=True):
            active = insert_version(connection, fingerprint, embedding_dim)
            store_id, created = uuid4().hex, time.time()
            texts = (
                _SPEC.dump_json(spec).decode(),
                _SETTINGS.dump_json(settings).decode(),
            )
            connection.execute(
                "INSERT INTO store VALUES (1, ?, ?, ?, ?, ?, NULL, 0, ?, 0, '', ?)",
                (
                    store_id,
                    *texts,
                    created,
                    active,
                    encode_stream(StreamState.start(spec.num_classes)),
                    row_checksum(store_id, created, *texts),
                ),
            )


def _damaged_identity(path: Path) -> StoreDamagedError:
    return StoreDamagedError(
        f"what {path} says of the store, such as its classes and its capacity, is not "
        "what was written; restore the folder from a backup, or create the store anew"
    )


def _require_format(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise StoreDamagedError(f"{path} is a database, but not of a store")
    if found != FORMAT:
        raise StoreError(
            f"{path} is a store of format {found}, expected {FORMAT}; open it with the "
            "version of this software that wrote it, export it, and add it here"
        )
