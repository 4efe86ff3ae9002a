"""Differences between a site's data and the memory that was made of it."""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnper.client.state import Offered
from knnper.data.site_data import NamedExamples, SiteData
from knnper.datastore.examples import Contents, ExamplesMissingError, Ids
from knnper.datastore.store import StoreReader

BATCH_SIZE = 1024  # stored inputs that are compared together
READ_ATTEMPTS = 10  # to read a store from which another process deletes
_LOG = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass(frozen=True)
class DataChanges:
    """Differences between data and memory, as names of examples.

    Attributes
    ----------
    new
        In the training or validation split, and never offered to the memory. Examples
        that were offered and are not stored were deleted or evicted, and do not count.
    changed
        Stored with another input or label.
    vanished
        Stored, and no longer in the data.
    tested
        Stored, and in the test split now.
    """

    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    vanished: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any((self.new, self.changed, self.vanished, self.tested))

    def __str__(self) -> str:
        kinds = {
            "new": self.new,
            "changed": self.changed,
            "vanished": self.vanished,
            "tested on now": self.tested,
        }
        counts = [f"{len(names)} {kind}" for kind, names in kinds.items() if names]
        return ", ".join(counts) or "none"


def all_new(data: SiteData) -> DataChanges:
    """Return the changes for a client that has no memory yet."""
    return DataChanges(new=data.train.names + data.validation.names)


def retry_if_deleted(read: Callable[[], R]) -> R:
    """Call ``read``, again if another process deletes examples that it reads."""
    # One snapshot for the whole of ``read`` would need no retries, but the process that
    # deletes could not erase the bytes of the examples before the end of ``read``.
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return read()
        except ExamplesMissingError as error:
            _LOG.info("examples were deleted while they were read; again: %s", error)
    return read()


def find_changes(store: StoreReader, offered: Offered, data: SiteData) -> DataChanges:
    """Compare ``data`` with the store that was made of it.

    `ExamplesMissingError` if another process deletes examples that are compared, see
    `retry_if_deleted`.
    """
    contents = store.contents()
    names = store.external_ids(contents.ids)
    stored = {name for name in names if name is not None}
    tested = set(data.test.names)
    in_data = {*data.train.names, *data.validation.names, *tested, *data.unreadable}
    arriving = itertools.chain(data.train.names, data.validation.names)
    changed = set(_changed_names(store, contents, names, data))
    return DataChanges(
        new=tuple(
            name for name in arriving if name not in stored and name not in offered
        ),
        # Examples that were added through the service do not come from the data, and
        # were not offered.
        changed=tuple(name for name in names if name in changed and name in offered),
        vanished=tuple(
            name
            for name in names
            if name is not None and name not in in_data and name in offered
        ),
        tested=tuple(name for name in names if name is not None and name in tested),
    )


def _changed_names(
    store: StoreReader, contents: Contents, names: list[str | None], data: SiteData
) -> Iterator[str]:
    """Yield the names of examples that are stored with another input or label."""
    for split in (data.train, data.validation):
        row_of = {name: row for row, name in enumerate(split.names)}
        in_both = [at for at, name in enumerate(names) if name in row_of]
        for start in range(0, len(in_both), BATCH_SIZE):
            stored_rows = np.array(in_both[start : start + BATCH_SIZE], dtype=np.int64)
            batch_names = [str(names[at]) for at in stored_rows]
            rows = torch.tensor([row_of[name] for name in batch_names])
            is_same = _same_inputs(store, contents.ids[stored_rows], split, rows)
            labels = split.examples.labels[rows].numpy()
            is_same &= labels == contents.labels[stored_rows]
            yield from itertools.compress(batch_names, ~is_same)


def _same_inputs(
    store: StoreReader, ids: Ids, split: NamedExamples, rows: Tensor
) -> NDArray[np.bool_]:
    """Return which inputs are equal bit by bit, bool (m,); so NaN equals itself."""
    stored = store.inputs(ids)
    current = split.examples.images[rows]
    if stored.dtype != current.dtype or stored.shape != current.shape:
        return np.zeros(len(ids), dtype=np.bool_)
    stored_bytes, current_bytes = (
        np.ascontiguousarray(inputs.numpy()).reshape(len(ids), -1).view(np.uint8)
        for inputs in (stored, current)
    )
    equal: NDArray[np.bool_] = (stored_bytes == current_bytes).all(axis=1)
    return equal
