"""Examples in the memory of this process, gone with it."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import (
    Contents,
    ExamplesMissingError,
    Ids,
    Selection,
    no_contents,
)
from knnper.datastore.index import Vectors
from knnper.datastore.policy import StreamState


@dataclass(frozen=True)
class Version:
    """One model's embeddings of the examples."""

    number: int
    fingerprint: str
    embedding_dim: int


@dataclass(frozen=True)
class Head:
    """What a store is at one moment, in a few words."""

    active: Version
    previous: int | None
    num_removed: int
    stream: StreamState


@dataclass(frozen=True)
class Change:
    """What one transaction does: it happens as a whole or not at all.

    Attributes
    ----------
    stream
        What the policy remembers afterwards.
    added
        New examples under new ids.
    embeddings
        Theirs, shape (n, p), of the active version.
    inputs
        Theirs, shape (n, ...); None where none are kept.
    external_ids
        Theirs.
    removed
        Ids that leave, from all versions.
    version
        Whose embeddings they are; it must be active.
    must_erase
        Whether `Rows.erase_removed` will be called: if that is cut short, it is made up
        for when the store is opened next.
    """

    stream: StreamState
    added: Contents = field(default_factory=no_contents)
    embeddings: Vectors | None = None
    inputs: NDArray[np.generic] | None = None
    external_ids: Sequence[str | None] = ()
    removed: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    version: int | None = None
    must_erase: bool = False


class Rows(Protocol):
    """Keeps the examples. What a method has done is done for good when it returns."""

    def head(self) -> Head:
        """Return what the store is."""

    def has_changed(self) -> bool:
        """Return whether another process changed the rows since the last call."""

    def reading(self) -> contextlib.AbstractContextManager[object]:
        """Return a block inside which all reads see one and the same moment."""

    def contents(self, after: int = 0) -> Contents:
        """Return the examples whose ids are larger than ``after``."""

    def vectors(self, ids: Ids, version: int) -> Vectors:
        """Return the embeddings (m, p) of ``ids`` (m,)."""

    def inputs(self, ids: Ids) -> NDArray[np.generic]:
        """Return the raw inputs (m, ...) of ``ids`` (m,), all of which are there."""

    def external_ids(self, ids: Ids) -> list[str | None]:
        """Return the owner's names of ``ids``; None for one that is not there."""

    def select(self, selection: Selection) -> Ids:
        """Return the ids that the selection describes, ascending."""

    def apply(self, change: Change) -> None:
        """Make the change."""

    def compact(self) -> None:
        """Give unused space back."""

    def is_erasing(self) -> bool:
        """Return whether something was removed that must leave no trace, and may."""

    def erase_removed(self) -> None:
        """Take every trace of what was removed out of the place where rows are kept."""

    def num_bytes(self) -> int:
        """Return the bytes on disk, free ones included, less the log of writes."""

    def versions(self) -> list[Version]:
        """Return all versions, oldest first."""

    def add_version(self, fingerprint: str, embedding_dim: int) -> Version:
        """Return a new version that holds nothing yet."""

    def without_vector(self, version: int, after: int, limit: int) -> Ids:
        """Return up to ``limit`` ids above ``after`` that lack an embedding."""

    def add_vectors(self, version: int, ids: Ids, vectors: Vectors) -> None:
        """Add embeddings (m, p) to a version; ids that have left are passed over."""

    def activate(self, version: int) -> None:
        """Search ``version`` from now on; keep the one before, drop all others."""

    def close(self) -> None:
        """Give back whatever is held."""


class MemoryRows:
    """Rows for simulations: no file, no fsync, the same behaviour."""

    def __init__(self, first: Version, num_classes: int) -> None:
        self._head = Head(first, None, 0, StreamState.start(num_classes))
        self._versions = {first.number: first}
        self._last_version = first.number
        self._contents = no_contents()
        self._vectors: dict[int, dict[int, Vectors]] = {first.number: {}}
        self._inputs: dict[int, NDArray[np.generic]] = {}
        self._external_ids: dict[int, str] = {}
        self._lock = threading.RLock()

    def head(self) -> Head:
        """See `Rows`."""
        return self._head

    def has_changed(self) -> bool:
        """Return False: no other process reaches this memory."""
        return False

    def reading(self) -> contextlib.AbstractContextManager[object]:
        """See `Rows`."""
        return self._lock

    def contents(self, after: int = 0) -> Contents:
        """See `Rows`."""
        return self._contents.take(self._contents.ids > after)

    def vectors(self, ids: Ids, version: int) -> Vectors:
        """See `Rows`."""
        dim = self._versions[version].embedding_dim
        held = self._vectors[version]
        try:
            rows = [held[one] for one in ids.tolist()]
        except KeyError as error:
            raise ExamplesMissingError(f"there is no example {error}") from error
        return np.stack(rows) if rows else np.empty((0, dim), np.float32)

    def inputs(self, ids: Ids) -> NDArray[np.generic]:
        """See `Rows`."""
        rows = [self._inputs[one] for one in ids.tolist()]
        return np.stack(rows) if rows else np.empty(0)

    def external_ids(self, ids: Ids) -> list[str | None]:
        """See `Rows`."""
        return [self._external_ids.get(one) for one in ids.tolist()]

    def select(self, selection: Selection) -> Ids:
        """See `Rows`."""
        held = self._contents
        chosen = np.ones(len(held), dtype=bool)
        if selection.ids is not None:
            chosen &= np.isin(held.ids, selection.ids)
        if selection.external_ids is not None:
            wanted = set(selection.external_ids)
            names = self.external_ids(held.ids)
            chosen &= np.array([name in wanted for name in names], dtype=bool)
        if selection.labels is not None:
            chosen &= np.isin(held.labels, selection.labels)
        if selection.arrived_from is not None:
            chosen &= held.arrivals >= selection.arrived_from
        if selection.arrived_before is not None:
            chosen &= held.arrivals < selection.arrived_before
        return held.ids[chosen]

    def apply(self, change: Change) -> None:
        """See `Rows`."""
        with self._lock:
            self._apply(change)

    def compact(self) -> None:
        """See `Rows`; nothing is unused."""

    def is_erasing(self) -> bool:
        """Return False."""
        return False

    def erase_removed(self) -> None:
        """See `Rows`; nothing of it is left in memory anyway."""

    def num_bytes(self) -> int:
        """Return 0: nothing is on disk."""
        return 0

    def versions(self) -> list[Version]:
        """See `Rows`."""
        return list(self._versions.values())

    def add_version(self, fingerprint: str, embedding_dim: int) -> Version:
        """See `Rows`."""
        self._last_version += 1
        version = Version(self._last_version, fingerprint, embedding_dim)
        self._versions[version.number] = version
        self._vectors[version.number] = {}
        return version

    def without_vector(self, version: int, after: int, limit: int) -> Ids:
        """See `Rows`."""
        later = self._contents.ids[self._contents.ids > after].tolist()
        lacking = [one for one in later if one not in self._vectors[version]]
        return np.array(lacking[:limit], dtype=np.int64)

    def add_vectors(self, version: int, ids: Ids, vectors: Vectors) -> None:
        """See `Rows`."""
        with self._lock:
            held = set(self._contents.ids.tolist())
            for one, vector in zip(ids.tolist(), vectors, strict=True):
                if one in held:
                    self._vectors[version][one] = vector.copy()

    def activate(self, version: int) -> None:
        """See `Rows`."""
        previous = self._head.active.number
        self._head = replace(
            self._head, active=self._versions[version], previous=previous
        )
        for number in set(self._versions) - {version, previous}:
            del self._versions[number], self._vectors[number]

    def close(self) -> None:
        """See `Rows`."""

    def _apply(self, change: Change) -> None:
        self._remove(change.removed)
        ids = change.added.ids.tolist()
        if change.embeddings is not None:
            # Copies: a row must not keep the whole batch it came with alive.
            rows = [row.copy() for row in change.embeddings]
            self._vectors[self._head.active.number].update(zip(ids, rows, strict=True))
        if change.inputs is not None:
            self._inputs.update(
                zip(ids, [one.copy() for one in change.inputs], strict=True)
            )
        given = change.external_ids or [None] * len(ids)
        names = zip(ids, given, strict=True)
        self._external_ids.update({one: name for one, name in names if name})
        self._contents = self._contents.followed_by(change.added)
        num_removed = self._head.num_removed + len(change.removed)
        self._head = replace(self._head, num_removed=num_removed, stream=change.stream)

    def _remove(self, ids: Ids) -> None:
        if len(ids) == 0:
            return
        self._contents = self._contents.without(ids)
        for one in ids.tolist():
            self._inputs.pop(one, None)
            self._external_ids.pop(one, None)
            for vectors in self._vectors.values():
                vectors.pop(one, None)
