"""The truth behind a store: what any place that keeps the examples must offer."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from datastore.contents import Contents, Ids, no_contents
from datastore.examples import Selection
from datastore.index.base import Vectors
from datastore.policy.base import StreamState


@dataclass(frozen=True)
class Version:
    """One model's embeddings of the examples.

    Attributes
    ----------
    number
        Names them; larger is younger.
    fingerprint
        Of the model.
    embedding_dim
        p.
    """

    number: int
    fingerprint: str
    embedding_dim: int


@dataclass(frozen=True)
class Head:
    """What a store is at one moment, in a few words.

    Attributes
    ----------
    active
        The version that is searched.
    previous
        The number of the version before, which can be rolled back to; None without.
    num_removed
        Examples that ever left. It grows whenever an id disappears.
    stream
        What the policy remembers.
    """

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
        """Return the embeddings (m, p) of ``ids`` (m,).

        Raises
        ------
        ExamplesMissingError
            If one of them has none.
        """

    def inputs(self, ids: Ids) -> NDArray[np.generic]:
        """Return the raw inputs (m, ...) of ``ids`` (m,), all of which are there."""

    def external_ids(self, ids: Ids) -> list[str | None]:
        """Return the owner's names of ``ids``; None for one that is not there."""

    def select(self, selection: Selection) -> Ids:
        """Return the ids that the selection describes, ascending."""

    def apply(self, change: Change) -> None:
        """Make the change.

        Raises
        ------
        StoreFullError
            If it does not fit on the disk; nothing has changed.
        """

    def compact(self) -> None:
        """Give unused space back.

        Raises
        ------
        StoreError
            If that cannot be done now.
        """

    def is_erasing(self) -> bool:
        """Return whether something was removed that must leave no trace, and may."""

    def erase_removed(self) -> None:
        """Take every trace of what was removed out of the place where rows are kept.

        Raises
        ------
        StoreError
            If that cannot be done now; it is done when the store is opened next.
        """

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
