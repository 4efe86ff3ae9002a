"""Deletion of examples from a store on disk, also of those that are damaged."""

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from datastore.contents import Ids
from datastore.core.cache import IndexCache
from datastore.core.rows import Change
from datastore.errors import StoreDamagedError
from datastore.examples import Selection
from datastore.folder import INDEX, open_rows, open_store
from datastore.policy.base import StreamState
from datastore.policy.deletion import forget

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
            store.delete(Selection(ids=tuple(ids.tolist())))
            return
    except StoreDamagedError as error:
        _LOG.info("the store is not opened to delete from it: %s", error)
    _delete_unopened(folder, ids)


def _delete_unopened(folder: Path, ids: Ids) -> None:
    with open_rows(folder, writable=True) as (_, rows):
        stream = _without(rows.head().stream, rows.labels_as_found(ids))
        rows.apply(Change(stream=stream, removed=ids, must_erase=True))
        IndexCache(folder / INDEX, rows).clear()
        rows.erase_removed()


def _without(stream: StreamState, labels: Iterable[object]) -> StreamState:
    """Return the state less what is gone, as far as its labels can be believed."""
    num_classes = len(stream.num_seen)
    known = [one for one in labels if isinstance(one, int) and 0 <= one < num_classes]
    counts = np.bincount(np.array(known, np.int64), minlength=num_classes)
    counts = np.minimum(counts, stream.num_seen)
    return forget(stream, np.repeat(np.arange(num_classes), counts))
