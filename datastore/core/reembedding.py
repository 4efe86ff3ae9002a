"""A second set of embeddings, by another model, beside the one that is searched."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from datastore.contents import Ids
from datastore.core.rows import Rows, Version
from datastore.errors import StoreError
from datastore.validation import require_embeddings

AT_ONCE = 256
"""Inputs that are embedded, and written, together."""

Embed = Callable[[Tensor], Tensor]
"""From raw inputs (m, ...) to representations, float32 of shape (m, p)."""

OnProgress = Callable[[int], None]
"""Is told how many more examples have an embedding."""


class ReembeddingStopped(StoreError):
    """The store was closed while it was embedded anew; what was done is kept."""


class VersionFiller:
    """Embeds the raw inputs by another model, into a version of that model.

    What is there already is not done again: a process that was killed, or a version
    that is rolled back to, goes on where it was left.

    Parameters
    ----------
    rows
        Hold the inputs, and get the embeddings.
    embed
        The model.
    fingerprint
        Of the model.
    stopping
        Ends the work with `ReembeddingStopped` when it is set.
    """

    def __init__(
        self, rows: Rows, embed: Embed, fingerprint: str, stopping: threading.Event
    ) -> None:
        self._rows = rows
        self._embed = embed
        self._fingerprint = fingerprint
        self._stopping = stopping
        self._version = self._found()

    def fill(self, on_progress: OnProgress) -> Version:
        """Embed what has no embedding yet; return the version.

        Raises
        ------
        DataError
            If the model gives no finite float32 of shape (m, p).
        ReembeddingStopped
            If the work was ended.
        """
        after = 0
        while True:
            ids, inputs = self._next(after)
            if len(ids) == 0:
                break
            self._fill_some(ids, inputs)
            on_progress(len(ids))
            after = int(ids[-1])
        return self._version or self._begun(self._embed(inputs))

    def _next(self, after: int) -> tuple[Ids, Tensor]:
        """Return some ids above ``after`` that lack an embedding, and their inputs."""
        if self._stopping.is_set():
            raise ReembeddingStopped(
                "the store was closed while it was embedded anew; start again to go on "
                "from where it was left"
            )
        # At one moment: an example may leave between the two reads.
        with self._rows.reading():
            ids = self._lacking(after)
            return ids, torch.from_numpy(self._rows.inputs(ids))

    def _fill_some(self, ids: Ids, inputs: Tensor) -> None:
        vectors = self._embed(inputs)
        dim = None if self._version is None else self._version.embedding_dim
        require_embeddings("embeddings by the new model", vectors, dim)
        version = self._version or self._begun(vectors)
        self._rows.add_vectors(version.number, ids, vectors.detach().numpy())

    def _begun(self, vectors: Tensor) -> Version:
        """Return a new version of embeddings like ``vectors``, shape (m, p)."""
        self._version = self._rows.add_version(self._fingerprint, int(vectors.shape[1]))
        return self._version

    def _lacking(self, after: int) -> Ids:
        if self._version is not None:
            return self._rows.without_vector(self._version.number, after, AT_ONCE)
        return self._rows.contents(after).ids[:AT_ONCE]

    def _found(self) -> Version | None:
        known = {one.fingerprint: one for one in self._rows.versions()}
        return known.get(self._fingerprint)
