"""How a site's data differs from what its memory was made of."""

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

AT_ONCE = 1024  # stored inputs that are compared together
READ_ATTEMPTS = 10  # of a store from which others delete
_LOG = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass(frozen=True)
class DataChanges:
    """Differences between data and memory, as names of examples.

    Attributes
    ----------
    new
        In the training or validation split, and never offered to the memory. Examples
        that were offered and are not stored were deleted, or evicted, and stay away.
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


def find_changes(store: StoreReader, offered: Offered, data: SiteData) -> DataChanges:
    """Return how ``data`` differs from the store that was made of it."""
    return reading(lambda: _found_changes(store, offered, data))


def all_new(data: SiteData) -> DataChanges:
    """Return the changes for a client that has no memory yet."""
    return DataChanges(new=data.train.names + data.validation.names)


def reading(read: Callable[[], R]) -> R:
    """Call ``read`` again while another process deletes from the store."""
    for _ in range(READ_ATTEMPTS - 1):
        try:
            return read()
        except ExamplesMissingError as error:
            _LOG.info("read again: %s", error)
    return read()


def _found_changes(store: StoreReader, offered: Offered, data: SiteData) -> DataChanges:
    contents = store.contents()
    names = store.external_ids(contents.ids)
    stored = {name for name in names if name is not None}
    tested, unreadable = set(data.test.names), set(data.unreadable)
    present = {*data.train.names, *data.validation.names}
    arriving = itertools.chain(data.train.names, data.validation.names)
    changed = set(_changed(store, contents, names, data))
    return DataChanges(
        new=tuple(
            name for name in arriving if name not in stored and name not in offered
        ),
        # Examples that were added through the service do not come from the data.
        changed=tuple(name for name in names if name in changed and name in offered),
        vanished=tuple(
            name
            for name in names
            if name is not None
            and name not in present
            and name not in tested
            and name not in unreadable
            and name in offered
        ),
        tested=tuple(name for name in names if name is not None and name in tested),
    )


def _changed(
    store: StoreReader, contents: Contents, names: list[str | None], data: SiteData
) -> Iterator[str]:
    """Yield the names under which another input or label is stored."""
    for split in (data.train, data.validation):
        places = {name: place for place, name in enumerate(split.names)}
        both = [at for at, name in enumerate(names) if name in places]
        for start in range(0, len(both), AT_ONCE):
            part = np.array(both[start : start + AT_ONCE], dtype=np.int64)
            named = [str(names[at]) for at in part]
            in_split = torch.tensor([places[name] for name in named])
            is_same = _same_inputs(store, contents.ids[part], split, in_split)
            labels = split.examples.labels[in_split].numpy()
            is_same &= labels == contents.labels[part]
            yield from itertools.compress(named, ~is_same)


def _same_inputs(
    store: StoreReader, ids: Ids, split: NamedExamples, places: Tensor
) -> NDArray[np.bool_]:
    """Return which inputs are the same, bool (m,), bit by bit: NaN equals itself."""
    stored, current = store.inputs(ids), split.examples.images[places]
    if stored.dtype != current.dtype or stored.shape != current.shape:
        return np.zeros(len(ids), dtype=np.bool_)
    rows = [
        np.ascontiguousarray(inputs.numpy()).reshape(len(ids), -1).view(np.uint8)
        for inputs in (stored, current)
    ]
    equal: NDArray[np.bool_] = (rows[0] == rows[1]).all(axis=1)
    return equal
