"""The kinds of index in small: each also with what it learns from few vectors."""

import numpy as np

from knnper.datastore.index import (
    FlatSettings,
    GraphSettings,
    HalfSettings,
    IndexSettings,
    ListsSettings,
    LossySettings,
    ProductSettings,
    ScalarSettings,
    Vectors,
)

DIM = 8

CASES: list[IndexSettings] = [
    FlatSettings(),
    HalfSettings(),
    ScalarSettings(),
    ProductSettings(num_parts=4, num_bits=4),
    GraphSettings(num_links=4, ef_search=16),
    ListsSettings(num_lists=4, num_probes=1),
]

NUM_LEARNT = 300
"""Enough for each case to learn from."""


def case_name(settings: IndexSettings) -> str:
    """Return what pytest calls a case."""
    return settings.name


def clustered(num_vectors: int, dim: int = DIM, seed: int = 0) -> Vectors:
    """Return vectors around 20 centres, float32 of shape (n, p)."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(20, dim))
    chosen = centres[rng.integers(0, 20, num_vectors)]
    noise = 0.4 * rng.normal(size=(num_vectors, dim))
    return (chosen + noise).astype(np.float32)


def keeps_vectors(settings: IndexSettings) -> bool:
    """Return whether the kind keeps vectors bit by bit."""
    return not isinstance(settings, LossySettings)


def squared_distances(queries: Vectors, vectors: Vectors) -> Vectors:
    """Return float64 distances, shape (m, n)."""
    difference = queries[:, None].astype(np.float64) - vectors[None]
    distances: Vectors = np.square(difference).sum(axis=2)
    return distances
