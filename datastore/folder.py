"""A store on disk: one folder for each client.

``store.sqlite3`` (with its log beside it) is the truth, ``acknowledged.json`` tells how
much of it there must be, ``index/`` is a cache, and ``writer.lock`` is held by the one
process that writes.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
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
from datastore.sqlite.acknowledged import Acknowledged, create_acknowledged
from datastore.sqlite.connection import (
    connect,
    damaged,
    is_unlogged,
    log_of,
    read_damaged_text,
    transaction,
)
from datastore.sqlite.log import damage
from datastore.sqlite.rows import SqliteRows
from datastore.sqlite.schema import create_tables, insert_version, require_tables
from datastore.sqlite.store_row import StoreRow, encode_stream
from datastore.sqlite.writer_lock import WriterLock, lock_holder
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
    with new_folder(folder) as draft:
        _write_database(draft, spec, embedding_dim, fingerprint, settings)
    return open_store(folder, writable=True)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to be filled, which becomes ``folder`` if nothing fails.

    Raises
    ------
    StoreError
        If ``folder`` holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(
            f"{folder} is not empty; expected a new folder for the store. Give another "
            "one, or open the store that is there"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{uuid4().hex}.draft")
    try:
        draft.mkdir()
        yield draft
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder.parent)


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
    with contextlib.ExitStack() as opened:
        identity, rows = opened.enter_context(open_rows(folder, writable=writable))
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


@contextlib.contextmanager
def open_rows(
    folder: Path, *, writable: bool = False
) -> Iterator[tuple[Identity, SqliteRows]]:
    """Yield what the store in ``folder`` was made for, and its rows, without the index.

    Raises
    ------
    StoreError
        As `open_store`.
    """
    require_database(folder)
    with contextlib.ExitStack() as opened:
        if writable:
            opened.callback(WriterLock(folder / LOCK).release)
        identity = read_identity(folder, writable=writable)
        rows = SqliteRows(folder / DATABASE, identity.spec.input, writable=writable)
        opened.callback(rows.close)
        yield identity, rows


def read_identity(folder: Path, *, writable: bool = False) -> Identity:
    """Return what the store in ``folder`` was made for.

    Parameters
    ----------
    folder
        Of the store.
    writable
        Whether this process holds the writer's lock.

    Raises
    ------
    StoreError
        If there is none, or another version of this software made it.
    StoreDamagedError
        If the tables are not those of a store, its description is not what was written,
        or what was acknowledged is not all there.
    """
    require_database(folder)
    path = folder / DATABASE
    # Before the database is read, which whoever writes goes on changing.
    acknowledged = Acknowledged.read(folder)
    broken = _log_damage(folder, writable=writable)
    with (
        contextlib.closing(connect(path, writable=False)) as connection,
        transaction(connection, path, writing=False),
    ):
        read_damaged_text(connection)
        require_tables(connection, path)
        row = StoreRow.read(connection, path)
    _require_acknowledged(path, row, acknowledged, broken)
    return identity_of(row)


def identity_of(row: StoreRow) -> Identity:
    """Return what a store was made for, as its row says.

    Raises
    ------
    StoreDamagedError
        If it says nothing that can be understood.
    """
    try:
        spec = _SPEC.validate_json(row.spec)
        settings = _SETTINGS.validate_json(row.settings)
    except ValidationError as error:
        raise StoreDamagedError(
            "the store's classes and settings cannot be understood; open it with the "
            "version of this software that wrote it"
        ) from error
    return Identity(row.store_id, row.created, spec, settings)


def _log_damage(folder: Path, *, writable: bool) -> str | None:
    """Return what is wrong with the log, as far as this can be told.

    Another process that writes has looked at the log when it began, and changes it.
    """
    log = log_of(folder / DATABASE)
    try:
        if is_unlogged(folder / DATABASE):
            return None
        if not writable and lock_holder(folder / LOCK) is not None:
            return None
        found = damage(log)
        if found is not None and not writable:
            # Somebody may have written meanwhile: what a kill leaves stays as it is.
            found = damage(log)
            return found if lock_holder(folder / LOCK) is None else None
    except (FileNotFoundError, PermissionError):
        return None  # Whoever wrote is done, or SQLite will say so.
    except OSError as error:
        return f"its log cannot be read ({error})"
    return found


def _require_acknowledged(
    path: Path, row: StoreRow, acknowledged: Acknowledged, broken: str | None
) -> None:
    if row.store_id != acknowledged.store_id:
        raise damaged(path, "the files in its folder are of different stores")
    lost = acknowledged.num_changes - row.num_changes
    if lost > 0:
        why = broken or "its log is damaged at the end, or missing"
        raise damaged(
            path,
            f"found {row.num_changes} changes, expected the {acknowledged.num_changes} "
            f"that were acknowledged; {why}",
        )
    if broken is not None:
        raise damaged(path, broken)


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
    with open_rows(folder, writable=True) as (identity, rows):
        spec, dim = identity.spec, rows.head().active.embedding_dim
        require_settings(settings, spec, dim)
        most, num_stored = settings.most_examples(spec, dim), len(rows.contents())
        if most is not None and most < num_stored:
            raise StoreError(
                f"found room for {most} examples in the new settings, expected at "
                f"least the {num_stored} that are stored; delete some first"
            )
        rows.configure(_SETTINGS.dump_json(settings).decode())


def _tidy_up(rows: SqliteRows, cache: IndexCache) -> None:
    """Finish what a writer that was killed had begun."""
    rows.settle()
    if rows.is_erasing():
        cache.clear()
        rows.erase_removed()
    cache.remove_leftovers()


def _write_database(
    folder: Path,
    spec: StoreSpec,
    embedding_dim: int,
    fingerprint: str,
    settings: StoreSettings,
) -> None:
    path = folder / DATABASE
    with contextlib.closing(connect(path, writable=True)) as connection:
        create_tables(connection)
        with transaction(connection, path, writing=True):
            active = insert_version(connection, fingerprint, embedding_dim)
            row = StoreRow(
                uuid4().hex,
                time.time(),
                _SPEC.dump_json(spec).decode(),
                _SETTINGS.dump_json(settings).decode(),
                active,
                encode_stream(StreamState.start(spec.num_classes)),
            )
            row.write(connection)
    create_acknowledged(folder, row)
