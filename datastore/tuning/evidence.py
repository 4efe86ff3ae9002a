"""Examples with known labels that show how well a combination of λ, k and σ does.

Two ways to get them: a split that is not in the store, or the stored examples
themselves, each of them looked up among all others.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from datastore.neighbors import Neighbors
from datastore.prediction.class_prior import reweighted
from datastore.validation import require_probabilities


class Searchable(Protocol):
    """As much of a store as is needed here."""

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        """Return the nearest stored examples of each query (m, p)."""


@dataclass(frozen=True)
class Queries:
    """m examples as the global model sees them.

    Attributes
    ----------
    embeddings
        φ(x), float32 of shape (m, p).
    probabilities
        p_global, shape (m, c), rows summing to 1.
    labels
        int64, shape (m,), in [0, c).
    class_ratios
        q/π of the examples that a query is looked up in, float64 of shape (m, c) or
        (1, c); None where the global model stays as it is. See
        `datastore.prediction.class_prior`.

    Raises
    ------
    ValueError
        If a row of ``probabilities`` is no distribution.
    """

    embeddings: Tensor
    probabilities: Tensor
    labels: Tensor
    class_ratios: Tensor | None = None

    def __post_init__(self) -> None:
        require_probabilities("global probabilities", self.probabilities)

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def take(self, chosen: Tensor) -> "Queries":
        """Return those that a bool (m,) marks."""
        ratios = self.class_ratios
        return Queries(
            self.embeddings[chosen],
            self.probabilities[chosen],
            self.labels[chosen],
            None if ratios is None else ratios.expand(len(self), -1)[chosen],
        )

    def adapted(self, sharpness: float) -> "Queries":
        """Return them as the global model sees them with the class prior and a β."""
        if self.class_ratios is None:
            return self
        seen = reweighted(self.probabilities, self.class_ratios, sharpness)
        return replace(self, probabilities=seen)


@dataclass(frozen=True)
class Evidence:
    """Queries and what is near them in the store; nothing where no neighbour is.

    Attributes
    ----------
    queries
        m examples.
    squared_distances
        To their neighbours, ascending, float64 of shape (m, k').
    neighbor_labels
        int64, shape (m, k').
    """

    queries: Queries
    squared_distances: Tensor
    neighbor_labels: Tensor

    def __len__(self) -> int:
        return len(self.queries) if self.squared_distances.shape[1] > 0 else 0

    def take(self, chosen: Tensor) -> "Evidence":
        """Return that of the queries which a bool (m,) marks."""
        return Evidence(
            self.queries.take(chosen),
            self.squared_distances[chosen],
            self.neighbor_labels[chosen],
        )

    def adapted(self, sharpness: float) -> "Evidence":
        """Return what they show of the global model with the class prior and a β."""
        return replace(self, queries=self.queries.adapted(sharpness))


def held_out(store: Searchable, queries: Queries, num_neighbors: int) -> Evidence:
    """Return the evidence of examples that are not in the store.

    Parameters
    ----------
    store
        A client's memory.
    queries
        A validation split.
    num_neighbors
        The largest k that is to be scored.

    Raises
    ------
    DataError
        As the store's search.
    """
    found = store.search(queries.embeddings, num_neighbors)
    return Evidence(queries, found.squared_distances, found.labels)


def left_one_out(
    store: Searchable, queries: Queries, ids: Tensor, num_neighbors: int
) -> Evidence:
    """Return the evidence of stored examples, as if each were not in the store.

    One search for all of them with one neighbour more, of which the example itself is
    dropped by its id. Where more than k of its duplicates are found before it, the
    last is dropped, since the others are the nearest without it.

    Parameters
    ----------
    store
        A client's memory.
    queries
        Stored examples.
    ids
        Their ids in the store, int64 of shape (m,).
    num_neighbors
        The largest k that is to be scored.

    Raises
    ------
    DataError
        As the store's search.
    """
    found = store.search(queries.embeddings, num_neighbors + 1)
    if len(ids) == 0:
        return Evidence(queries, found.squared_distances, found.labels)
    own = found.ids == ids[:, None]
    own[:, -1] |= ~own.any(dim=1)
    shape = (len(ids), found.ids.shape[1] - 1)
    return Evidence(
        queries,
        found.squared_distances[~own].reshape(shape),
        found.labels[~own].reshape(shape),
    )


def no_evidence(num_classes: int) -> Evidence:
    """Return what a client has that can score nothing."""
    return Evidence(
        Queries(
            torch.empty((0, 0)),
            torch.empty((0, num_classes)),
            torch.empty(0, dtype=torch.int64),
        ),
        torch.empty((0, 0), dtype=torch.float64),
        torch.empty((0, 0), dtype=torch.int64),
    )
