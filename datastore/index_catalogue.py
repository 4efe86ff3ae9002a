"""The kinds of index that a store can be given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from knnper.datastore.index import Ids, VectorIndex, Vectors
from knnper.datastore.index_kinds import (
    FlatIndex,
    FlatSettings,
    GraphIndex,
    GraphSettings,
    HalfIndex,
    HalfSettings,
    ListsIndex,
    ListsSettings,
    ProductIndex,
    ProductSettings,
    ScalarIndex,
    ScalarSettings,
    build_flat,
    build_graph,
    build_half,
    build_lists,
    build_product,
    build_scalar,
    read_flat,
    read_graph,
    read_half,
    read_lists,
    read_product,
    read_scalar,
)

__all__ = [
    "INDEX_KINDS",
    "FlatSettings",
    "GraphSettings",
    "HalfSettings",
    "IndexKind",
    "IndexSettings",
    "ListsSettings",
    "ProductSettings",
    "ScalarSettings",
    "build_index",
    "read_index",
]

IndexSettings = Annotated[
    FlatSettings
    | HalfSettings
    | ScalarSettings
    | ProductSettings
    | GraphSettings
    | ListsSettings,
    Field(discriminator="name"),
]

# A kind takes the settings of its own type only, which no common type can say.
Build = Callable[[Any, int, Ids, Vectors], VectorIndex]
Read = Callable[[Any, Path, int], VectorIndex]


@dataclass(frozen=True)
class IndexKind:
    """One kind of index.

    Attributes
    ----------
    summary
        What it is, in a line.
    settings_type
        Its settings.
    index_type
        What `build` and `read` return.
    build
        ``(settings, dim, ids, vectors) -> index``.
    read
        ``(settings, path, dim) -> index``.
    """

    summary: str
    settings_type: type[IndexSettings]
    index_type: type[VectorIndex]
    build: Build
    read: Read


INDEX_KINDS: Mapping[str, IndexKind] = {
    "flat": IndexKind(
        "every vector as it is, and compared with every query",
        FlatSettings,
        FlatIndex,
        build_flat,
        read_flat,
    ),
    "fp16": IndexKind(
        "numbers in half precision",
        HalfSettings,
        HalfIndex,
        build_half,
        read_half,
    ),
    "sq8": IndexKind(
        "numbers in 8 bits",
        ScalarSettings,
        ScalarIndex,
        build_scalar,
        read_scalar,
    ),
    "pq": IndexKind(
        "parts of a vector as numbers of centroids",
        ProductSettings,
        ProductIndex,
        build_product,
        read_product,
    ),
    "hnsw": IndexKind(
        "a graph of near vectors",
        GraphSettings,
        GraphIndex,
        build_graph,
        read_graph,
    ),
    "ivf": IndexKind(
        "lists of near vectors",
        ListsSettings,
        ListsIndex,
        build_lists,
        read_lists,
    ),
}


def build_index(
    settings: IndexSettings, dim: int, ids: Ids, vectors: Vectors
) -> VectorIndex:
    """Return an index of vectors.

    The same vectors in the same order make the same index.

    Parameters
    ----------
    settings
        Name the kind.
    dim
        p, the length of a vector.
    ids
        No two alike, none negative, int64 of shape (n,); n may be 0.
    vectors
        Shape (n, p), in the order of ``ids``.

    Raises
    ------
    ConfigError
        If the settings do not go with p.
    """
    return INDEX_KINDS[settings.name].build(settings, dim, ids, vectors)


def read_index(settings: IndexSettings, path: Path, dim: int) -> VectorIndex:
    """Return the index that `VectorIndex.write` wrote to ``path``.

    Parameters
    ----------
    settings
        With which it was built. What is said of searching may differ.
    path
        Its file.
    dim
        p, the length of a vector.

    Raises
    ------
    StoreDamagedError
        If there is something else in the file, or it cannot be read.
    """
    return INDEX_KINDS[settings.name].read(settings, path, dim)
