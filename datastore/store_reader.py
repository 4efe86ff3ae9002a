"""A client's memory: its examples' representations, and a search among them.

knn-per.txt, Eq. 3 (the datastore) and Eq. 4-5 (the nearest neighbours).
"""

import contextlib
import time
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from datastore.contents import Contents, Ids
from datastore.core.live_view import LiveView
from datastore.core.rows import Rows
from datastore.errors import (
    ExamplesMissingError,
    StoreError,
    StoreMismatchError,
)
from datastore.examples import Selection, StoreSpec
from datastore.index.base import VectorIndex
from datastore.neighbors import Neighbors
from datastore.settings import StoreSettings
from datastore.validation import require_embeddings

PAUSES_S = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Before a search is tried again; see `StoreReader.search`."""


class StoreReader:
    """n examples with their representations and labels, searched by distance.

    Any number of threads may use one object. What another process changes is seen by
    whatever is asked next.

    Parameters
    ----------
    rows
        The truth.
    live
        What is searched of it.
    spec
        What the store is made for.
    settings
        Policy, capacity and kind of index.
    fingerprint
        Of the model that embeds the queries; None does not ask.
    resources
        Closed with the store.
    """

    def __init__(
        self,
        rows: Rows,
        live: LiveView,
        spec: StoreSpec,
        settings: StoreSettings,
        *,
        fingerprint: str | None = None,
        resources: contextlib.ExitStack | None = None,
    ) -> None:
        self.spec, self.settings = spec, settings
        self._rows, self._live = rows, live
        self._expected_model = fingerprint
        self._resources = resources or contextlib.ExitStack()

    def __len__(self) -> int:
        return len(self.contents())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_classes(self) -> int:
        """c, the number of labels."""
        return self.spec.num_classes

    @property
    def embedding_dim(self) -> int:
        """p, the size of a representation."""
        return self._live.head.active.embedding_dim

    @property
    def fingerprint(self) -> str:
        """Of the model that embedded what is searched."""
        return self._live.head.active.fingerprint

    @property
    def capacity(self) -> int | None:
        """The most examples that are stored; None if that is not bounded."""
        return self.settings.most_examples(self.spec, self.embedding_dim)

    @property
    def index(self) -> VectorIndex:
        """The index, to be looked at; the store alone changes it."""
        return self._live.view.index

    def contents(self) -> Contents:
        """Return ids, labels and times of arrival of what is stored."""
        self._live.refresh()
        return self._live.view.contents

    def vectors(self, ids: Ids) -> Tensor:
        """Return the embeddings, float32 of shape (m, p), of stored ids (m,)."""
        return torch.from_numpy(self._live.view.vectors(ids))

    def inputs(self, ids: Ids) -> Tensor:
        """Return the raw inputs, shape (m, ...), of stored ids (m,).

        Raises
        ------
        StoreError
            If the store keeps none.
        """
        self._require_inputs()
        return torch.from_numpy(self._rows.inputs(ids))

    def external_ids(self, ids: Ids) -> list[str | None]:
        """Return the owner's names of stored ids (m,)."""
        return self._rows.external_ids(ids)

    def select(self, selection: Selection) -> Ids:
        """Return the ids that the selection describes, ascending."""
        return self._rows.select(selection)

    def search(
        self, queries: Tensor, num_neighbors: int, fingerprint: str | None = None
    ) -> Neighbors:
        """Return the ``num_neighbors`` nearest examples of each query, or all n.

        Parameters
        ----------
        queries
            float32, shape (m, p), embedded by the model that embedded the store.
        num_neighbors
            k, at least 1.
        fingerprint
            Of the model that embedded the queries; by default that with which the
            store was opened, see `expect_model`.

        Raises
        ------
        DataError
            If a query is not finite or p differs.
        StoreMismatchError
            If another model embedded the store, or has embedded it anew meanwhile.
        ValueError
            If k is not positive.
        """
        if num_neighbors < 1:
            raise ValueError(f"expected at least one neighbour, found {num_neighbors}")
        for pause_s in PAUSES_S:
            try:
                return self._search(queries, num_neighbors, fingerprint)
            except ExamplesMissingError:
                # Candidates that are compared by the database may have left it since.
                time.sleep(pause_s)
        return self._search(queries, num_neighbors, fingerprint)

    def _search(
        self, queries: Tensor, num_neighbors: int, fingerprint: str | None
    ) -> Neighbors:
        self._live.refresh()
        view = self._live.view
        require_model(view.version.fingerprint, fingerprint or self._expected_model)
        require_embeddings("queries", queries, view.version.embedding_dim)
        return view.search(queries, num_neighbors)

    def expect_model(self, fingerprint: str | None) -> None:
        """Say which model embeds queries and new examples from now on.

        Parameters
        ----------
        fingerprint
            Of the model; None does not ask.
        """
        self._expected_model = fingerprint

    def close(self) -> None:
        """Give back what the store holds; it cannot be used any more."""
        self._resources.close()

    def _require_inputs(self) -> None:
        if self.spec.input is None:
            raise StoreError(
                "the store keeps no raw inputs: it was created without a layout for "
                "them. Create one with StoreSpec.input, and add the examples again"
            )


def require_model(stored: str, found: str | None) -> None:
    """Refuse a model that did not embed a store.

    Parameters
    ----------
    stored
        Fingerprint of the model that did.
    found
        Of the model at hand; None is not asked about.

    Raises
    ------
    StoreMismatchError
        If they differ.
    """
    if found is not None and found != stored:
        raise StoreMismatchError(
            f"the store was embedded by the model {stored[:12]}, found the model "
            f"{found[:12]}; distances between the two mean nothing. Give the run the "
            "store was made with, or embed the store anew by the other one: knnper "
            "store reembed"
        )
