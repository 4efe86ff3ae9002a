"""From the candidates of an index to the nearest examples, exactly.

An index finds candidates in float32, or by rounded codes. Their distances are computed
anew in float64, and where rounding or ties leave a doubt, all examples are compared. So
a query's neighbours do not depend on the other queries, and no distance overflows.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from knnper.datastore.examples import Ids
from knnper.datastore.index import NOTHING, VectorIndex, Vectors
from knnper.datastore.index_kinds import IndexSettings

QUERIES_AT_ONCE = 16
"""The candidates of so many queries fit in a processor's cache."""

ROWS_AT_ONCE = 256
"""So many rows in float64 do too."""

_EPS, _TINY = (float(one) for one in (np.finfo("f4").eps, np.finfo("f4").tiny))

Distances = NDArray[np.float64]
VectorsOf = Callable[[Ids], Vectors]


def nearest(
    queries: Vectors,
    index: VectorIndex,
    settings: IndexSettings,
    num_found: int,
    read_vectors: VectorsOf,
) -> tuple[Distances, Ids]:
    """Return squared distances, ascending, and ids, both (m, num_found).

    Parameters
    ----------
    queries
        Shape (m, p).
    index
        Finds the candidates.
    settings
        Of the index: how many candidates it is asked for, and whether they are
        compared exactly. If not, the distances are those that the index has.
    num_found
        How many neighbours; from 1 to n.
    read_vectors
        Returns stored vectors (m, p) by id, where the index does not keep them.
    """
    parts = [
        _nearest(
            queries[start : start + QUERIES_AT_ONCE],
            index,
            settings,
            num_found,
            read_vectors,
        )
        for start in range(0, len(queries), QUERIES_AT_ONCE)
    ]
    if len(parts) == 1:
        return parts[0]
    return (
        np.concatenate([distances for distances, _ in parts]),
        np.concatenate([ids for _, ids in parts]),
    )


def _nearest(
    queries: Vectors,
    index: VectorIndex,
    settings: IndexSettings,
    num_found: int,
    read_vectors: VectorsOf,
) -> tuple[Distances, Ids]:
    count = min(settings.candidates_for(num_found), len(index))
    if not settings.ranks_exactly:
        rough, ids = index.candidates(queries, count)
        distances = rough.astype(np.float64)
    elif index.keeps_vectors:
        rough, ids, vectors = index.candidates_with_vectors(queries, count)
        distances = _squared_distances(queries[:, None], vectors)
    else:
        rough, ids = index.candidates(queries, count)
        distances = _squared_distances(
            queries[:, None], _each_once(ids, index.ids[:1], read_vectors)
        )
    distances, found = _first(distances, ids, num_found)
    certain = (ids != NOTHING).all(axis=1)
    if settings.is_exhaustive and count < len(index):
        certain &= _certainly_below(distances[:, -1], rough[:, -1], index.dim)
    if not certain.all():
        vectors_of = index.vectors if index.keeps_vectors else read_vectors
        for row in np.flatnonzero(~certain).tolist():
            distances[row], found[row] = _scan(
                queries[row], index.ids, num_found, vectors_of
            )
    return distances, found


def _each_once(ids: Ids, any_id: Ids, read_vectors: VectorsOf) -> Vectors:
    """Return vectors (m, count, p), reading no id twice."""
    known = np.where(ids == NOTHING, any_id, ids)
    unique, positions = np.unique(known, return_inverse=True)
    return read_vectors(unique)[positions.reshape(ids.shape)]


def _certainly_below(exact: Distances, rough: Vectors, dim: int) -> NDArray[np.bool_]:
    """Return whether ``exact`` is smaller than what ``rough`` was rounded from."""
    bound = rough.astype(np.float64) * (1 - (dim + 8) * _EPS) - dim * _TINY
    certain: NDArray[np.bool_] = exact < bound
    return certain


def _scan(
    query: Vectors, ids: Ids, num_found: int, vectors_of: VectorsOf
) -> tuple[Distances, Ids]:
    """Return the nearest of one query (p,) among all ``ids``, by brute force."""
    ids = np.sort(ids)
    parts = [ids[i : i + ROWS_AT_ONCE] for i in range(0, len(ids), ROWS_AT_ONCE)]
    distances = np.concatenate(
        [_squared_distances(query, vectors_of(part)) for part in parts]
    )
    nearest_distances, nearest_ids = _first(distances[None], ids[None], num_found)
    return nearest_distances[0], nearest_ids[0]


def _squared_distances(queries: Vectors, vectors: Vectors) -> Distances:
    """Return float64 of the shape that the arguments broadcast to, less the last."""
    difference = vectors.astype(np.float64)
    difference -= queries
    squares: Distances = np.einsum("...p,...p->...", difference, difference)
    return squares


def _first(distances: Distances, ids: Ids, count: int) -> tuple[Distances, Ids]:
    """Return the nearest ``count`` of each row; of equals, the smaller ids."""
    order = np.lexsort((ids, distances))[:, :count]
    rows = np.arange(len(distances))[:, None]
    return distances[rows, order], ids[rows, order]
