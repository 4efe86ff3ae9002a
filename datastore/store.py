"""A client's memory: the representations of its examples, and a search among them.

knn-per.txt, Eq. 3 (the datastore) and Eq. 4-5 (the nearest neighbours).
"""

from dataclasses import dataclass

import faiss
import torch
from torch import Tensor

from datastore.validation import require_embeddings, require_labels

NUM_SPARE = 8
"""Candidates beyond k that FAISS is asked for, so that its order can be corrected."""

QUERIES_AT_ONCE, NUMBERS_AT_ONCE = 16, 65536
"""With so few queries, and numbers in them, FAISS sums squared differences. Above some
threshold (20 queries, in later versions 128,000 numbers) it expands them into a dot
product, whose cancellation can lose all digits of a small distance."""

ROWS_AT_ONCE = 256
"""Rows that are compared in float64 at a time: they fit in a processor's cache."""


@dataclass(frozen=True)
class Neighbors:
    """The nearest stored examples of m queries, nearest first; k' = min(k, n).

    Attributes
    ----------
    squared_distances
        Squared Euclidean distances, float64 of shape (m, k').
    labels
        int64, shape (m, k').
    ids
        Positions in the store, int64 of shape (m, k'). Of two examples at the same
        distance the one with the smaller id comes first.
    """

    squared_distances: Tensor
    labels: Tensor
    ids: Tensor


class LocalStore:
    """n examples' representations and labels, in memory. It never changes.

    FAISS finds candidates in float32; their distances are then computed anew in
    float64, and where rounding or ties leave a doubt, all n are compared. So a query's
    neighbours do not depend on the other queries, and no distance overflows.

    Parameters
    ----------
    embeddings
        float32, shape (n, p).
    labels
        int64, shape (n,), in [0, c).
    num_classes
        c.

    Raises
    ------
    DataError
        If an embedding is not finite, a label is out of range, or lengths differ.
    """

    def __init__(self, embeddings: Tensor, labels: Tensor, num_classes: int) -> None:
        require_embeddings("embeddings to store", embeddings)
        require_labels(labels, len(embeddings), num_classes)
        self.embeddings = embeddings.detach().clone(
            memory_format=torch.contiguous_format
        )
        self.labels = labels.clone()
        self.num_classes = num_classes
        _use_one_thread()
        self._index = faiss.IndexFlatL2(self.embedding_dim)
        self._index.add(self.embeddings.numpy())

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    @property
    def embedding_dim(self) -> int:
        """p, the size of a representation."""
        return int(self.embeddings.shape[1])

    def with_added(self, embeddings: Tensor, labels: Tensor) -> "LocalStore":
        """Return a store with these examples after the ones that are here.

        Parameters
        ----------
        embeddings
            float32, shape (m, p).
        labels
            int64, shape (m,).

        Raises
        ------
        DataError
            As the constructor, or if p differs.
        """
        require_embeddings("embeddings to add", embeddings, self.embedding_dim)
        return LocalStore(
            torch.cat([self.embeddings, embeddings]),
            torch.cat([self.labels, labels]),
            self.num_classes,
        )

    def search(self, queries: Tensor, num_neighbors: int) -> Neighbors:
        """Return the ``num_neighbors`` nearest examples of each query, or all n.

        Parameters
        ----------
        queries
            float32, shape (m, p).
        num_neighbors
            k, at least 1.

        Raises
        ------
        DataError
            If a query is not finite or p differs.
        ValueError
            If k is not positive.
        """
        if num_neighbors < 1:
            raise ValueError(f"expected at least one neighbour, found {num_neighbors}")
        require_embeddings("queries", queries, self.embedding_dim)
        num_found = min(num_neighbors, len(self))
        distances = torch.empty((len(queries), num_found), dtype=torch.float64)
        ids = torch.empty((len(queries), num_found), dtype=torch.int64)
        if num_found > 0:
            at_once = max(1, min(QUERIES_AT_ONCE, NUMBERS_AT_ONCE // queries.shape[1]))
            for start in range(0, len(queries), at_once):
                rows = slice(start, start + at_once)
                distances[rows], ids[rows] = self._nearest(queries[rows], num_found)
        return Neighbors(distances, self.labels[ids], ids)

    def _nearest(self, queries: Tensor, num_found: int) -> tuple[Tensor, Tensor]:
        rough, candidates = self._candidates(queries, num_found)
        # -1 pads where FAISS's distances overflow; such a row is done again below.
        ids = candidates.clamp_min(0).sort(dim=1).values
        distances = _squared_distances(queries[:, None], self.embeddings[ids])
        distances, ids = _first(distances, ids, num_found)
        certain = (candidates >= 0).all(dim=1)
        if candidates.shape[1] < len(self):
            certain &= self._certainly_below(distances[:, -1], rough[:, -1])
        for row in (~certain).nonzero().flatten().tolist():
            distances[row], ids[row] = self._scan(queries[row], num_found)
        return distances, ids

    def _candidates(self, queries: Tensor, num_found: int) -> tuple[Tensor, Tensor]:
        """Return FAISS's squared distances, ascending, and ids, both (m, k)."""
        _use_one_thread()
        num_candidates = min(num_found + NUM_SPARE, len(self))
        rough, ids = self._index.search(queries.numpy(), num_candidates)
        return torch.from_numpy(rough), torch.from_numpy(ids)

    def _certainly_below(self, exact: Tensor, rough: Tensor) -> Tensor:
        """Return whether ``exact`` is smaller than what ``rough`` was rounded from.

        A float32 sum of p squares is off by at most about p 2^-23 of itself, and by
        p times the smallest normal number where squares underflow.
        """
        float32 = torch.finfo(torch.float32)
        bound = rough.double() * (1 - (self.embedding_dim + 8) * float32.eps)
        return exact < bound - self.embedding_dim * float32.tiny

    def _scan(self, query: Tensor, num_found: int) -> tuple[Tensor, Tensor]:
        """Return the nearest of one query (p,) among all n, by brute force."""
        parts = torch.split(self.embeddings, ROWS_AT_ONCE)
        distances = torch.cat([_squared_distances(query, part) for part in parts])
        ids = torch.arange(len(self))
        distances, ids = _first(distances[None], ids[None], num_found)
        return distances[0], ids[0]


def _squared_distances(queries: Tensor, embeddings: Tensor) -> Tensor:
    """Return float64 of the shape that the arguments broadcast to, less the last."""
    return (queries.double() - embeddings).square_().sum(dim=-1)


def _first(distances: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the nearest ``count`` of each row, whose ids are ascending."""
    order = torch.argsort(distances, dim=1, stable=True)[:, :count]
    return distances.gather(1, order), ids.gather(1, order)


def _use_one_thread() -> None:
    """Keep FAISS from OpenMP's default, with which forks hang and workers compete.

    The number is a property of the calling thread, so it is set before each use.
    """
    faiss.omp_set_num_threads(1)
