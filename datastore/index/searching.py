"""A search with FAISS that does not depend on which queries come together."""

from collections.abc import Iterator

import faiss
import numpy as np

from datastore.index.base import Ids, Vectors
from datastore.index.single_thread import use_one_thread

QUERIES_AT_ONCE, NUMBERS_AT_ONCE = 16, 65536
"""With so few queries, and numbers in them, FAISS sums squared differences. Above some
threshold (20 queries, in later versions 128,000 numbers) it expands them into a dot
product, whose cancellation can lose all digits of a small distance."""


def queries_at_once(dim: int) -> int:
    """Return how many queries of ``dim`` numbers FAISS may be given together."""
    return max(1, min(QUERIES_AT_ONCE, NUMBERS_AT_ONCE // dim))


def search(
    index: faiss.Index,
    queries: Vectors,
    count: int,
    at_once: int,
    params: faiss.SearchParameters | None = None,
) -> tuple[Vectors, Ids]:
    """Return squared distances, ascending, and FAISS's labels, each (m, count).

    Parameters
    ----------
    index
        Any index of FAISS; -1 pads its rows.
    queries
        Shape (m, p).
    count
        At least 1.
    at_once
        Queries in one call.
    params
        What FAISS is told about the search.
    """
    use_one_thread()
    if len(queries) <= at_once:
        rough, found = index.search(queries, count, params=params)
        return rough, found
    distances = np.empty((len(queries), count), dtype=np.float32)
    labels = np.empty((len(queries), count), dtype=np.int64)
    for rows in batches(len(queries), at_once):
        found = index.search(queries[rows], count, params=params)
        distances[rows], labels[rows] = found
    return distances, labels


def batches(num_queries: int, at_once: int) -> Iterator[slice]:
    """Yield the rows of each batch."""
    for start in range(0, num_queries, at_once):
        yield slice(start, start + at_once)
