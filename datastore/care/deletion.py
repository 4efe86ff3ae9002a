"""Deletion of examples from a store on disk, also of those that are damaged."""

import contextlib
import logging
from pathlib import Path

import numpy as np

from datastore.contents import Contents, Ids
from datastore.core.cache import IndexCache
from datastore.core.rows import Change
from datastore.errors import StoreDamagedError
from datastore.examples import Selection
from datastore.folder import DATABASE, INDEX, LOCK, open_store, read_identity
from datastore.policy.base import StreamState
from datastore.policy.deletion import forget
from datastore.sqlite.rows import SqliteRows
from datastore.sqlite.writer_lock import WriterLock

_LOG = logging.getLogger(__name__)


def delete_examples(folder: Path, ids: Ids) -> None:
    """Delete stored examples, and every trace of them; see `Store.delete`.

    An example whose embedding or label is damaged may keep the store from being opened,
    or from deleting anything. It is then taken out of the database alone, and the index
    is built anew when the store is opened next.

    Parameters
    ----------
    folder
        Of the store.
    ids
        What to delete, int64 of shape (m,).

    Raises
    ------
    StoreError
        As `open_store` and `Store.delete`.
    """
    try:
        with open_store(folder, writable=True) as store:
            if _has_sound_labels(store.contents(), store.num_classes):
                store.delete(Selection(ids=tuple(ids.tolist())))
                return
    except StoreDamagedError as error:
        _LOG.info("the store is not opened to delete from it: %s", error)
    _delete_unopened(folder, ids)


def _has_sound_labels(contents: Contents, num_classes: int) -> bool:
    return bool(((contents.labels >= 0) & (contents.labels < num_classes)).all())


def _delete_unopened(folder: Path, ids: Ids) -> None:
    layout = read_identity(folder).spec.input
    with contextlib.ExitStack() as opened:
        opened.callback(WriterLock(folder / LOCK).release)
        rows = SqliteRows(folder / DATABASE, layout, writable=True)
        opened.callback(rows.close)
        contents = rows.contents()
        gone = contents.take(np.isin(contents.ids, ids))
        stream = _without(rows.head().stream, gone)
        rows.apply(Change(stream=stream, removed=gone.ids, must_erase=True))
        IndexCache(folder / INDEX, rows).clear()
        rows.erase_removed()


def _without(stream: StreamState, gone: Contents) -> StreamState:
    """Return the state less what is gone, as far as its labels can be believed."""
    num_classes = len(stream.num_seen)
    known = gone.labels[(gone.labels >= 0) & (gone.labels < num_classes)]
    counts = np.bincount(known, minlength=num_classes)
    counts = np.minimum(counts, stream.num_seen)
    return forget(stream, np.repeat(np.arange(num_classes), counts))
