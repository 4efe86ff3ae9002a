"""What is found, and when an index should be built anew."""

import numpy as np
import pytest

from knnper.datastore.index import (
    FlatSettings,
    GraphSettings,
    HalfSettings,
    IndexSettings,
    ListsSettings,
    ProductSettings,
    ScalarSettings,
    VectorIndex,
    Vectors,
)
from tests.datastore.index.index_cases import clustered, squared_distances

NUM_VECTORS, DIM, COUNT = 2000, 32, 10
VECTORS, QUERIES = clustered(NUM_VECTORS, DIM), clustered(100, DIM, seed=1)


def built(settings: IndexSettings, vectors: Vectors = VECTORS) -> VectorIndex:
    ids = np.arange(len(vectors))
    return settings.build(vectors.shape[1], ids, vectors)


def recall(index: VectorIndex, vectors: Vectors, count: int = COUNT) -> float:
    """Return the part of the 10 nearest that is among ``count`` candidates."""
    nearest = squared_distances(QUERIES, vectors).argsort(axis=1)[:, :COUNT]
    _, found = index.candidates(QUERIES, count)
    pairs = zip(nearest.tolist(), found.tolist(), strict=True)
    return sum(len(set(one) & set(other)) for one, other in pairs) / nearest.size


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (FlatSettings(), 1.0),
        (HalfSettings(), 0.995),
        (ScalarSettings(), 0.95),
        (ProductSettings(num_parts=16), 0.7),
        (GraphSettings(), 0.97),
        (ListsSettings(), 0.97),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_nearest_are_found(settings: IndexSettings, expected: float) -> None:
    assert recall(built(settings), VECTORS) >= expected


def test_four_times_as_many_candidates_hold_nearly_all() -> None:
    index = built(ProductSettings(num_parts=16))
    assert recall(index, VECTORS, 4 * COUNT) >= 0.97


def test_more_effort_finds_more() -> None:
    few = recall(built(ListsSettings(num_probes=1)), VECTORS)
    many = recall(built(ListsSettings(num_probes=44)), VECTORS)
    assert few < 0.9
    assert many == 1.0
    narrow = built(GraphSettings(num_links=4, ef_construction=8, ef_search=1))
    assert recall(narrow, VECTORS) < recall(built(GraphSettings()), VECTORS)


def test_the_graph_finds_the_nearest_that_live() -> None:
    index = built(GraphSettings(ef_search=32))
    gone = np.random.default_rng(0).permutation(NUM_VECTORS)[:1600]
    index.remove(gone)
    left = VECTORS.copy()
    left[gone] = 1e6
    assert recall(index, left) >= 0.95


def test_the_graph_compares_all_where_the_nearest_are_dead() -> None:
    index = built(GraphSettings(ef_search=1))
    nearest = squared_distances(QUERIES[:1], VECTORS)[0].argsort()
    index.remove(nearest[: NUM_VECTORS - 3])
    _, found = index.candidates(QUERIES[:1], 3)
    assert found[0].tolist() == nearest[-3:].tolist()


def test_rough_distances_of_flat_do_not_cancel() -> None:
    """A difference of 1 beside 10^4 is lost where distances are expanded."""
    dim, num_vectors = 2048, 100
    steps = np.arange(num_vectors)[:, None] * np.ones((1, dim))
    vectors = (1e4 + steps).astype(np.float32)
    rough, ids = built(FlatSettings(), vectors).candidates(vectors, 3)
    assert ids[:, 0].tolist() == list(range(num_vectors))
    assert rough[10].tolist() == [0, dim, dim]


@pytest.mark.parametrize("dim", [7, 2048])
def test_rough_distances_of_flat_keep_their_bound(dim: int) -> None:
    vectors, queries = clustered(60, dim), clustered(30, dim, seed=1)
    rough, ids = built(FlatSettings(), vectors).candidates(queries, 60)
    exact = squared_distances(queries, vectors)
    exact = np.take_along_axis(exact, ids, axis=1)
    eps = np.finfo(np.float32).eps
    assert (np.abs(rough.astype(np.float64) - exact) <= (dim + 8) * eps * exact).all()


def test_codes_are_learnt_once_there_are_enough() -> None:
    index = built(ScalarSettings(), VECTORS[:255])
    assert not index.is_outgrown
    assert index.vectors(np.arange(255)).tobytes() == VECTORS[:255].tobytes()
    index.add(np.array([255]), VECTORS[255:256])
    assert index.is_outgrown
    assert not built(ScalarSettings(), VECTORS[:256]).is_outgrown


def test_centroids_need_four_vectors_each() -> None:
    settings = ProductSettings(num_parts=4, num_bits=5)
    few = built(settings, VECTORS[:127])
    assert few.vectors(np.arange(127)).tobytes() == VECTORS[:127].tobytes()
    enough = built(settings, VECTORS[:128])
    assert enough.vectors(np.arange(128)).tobytes() != VECTORS[:128].tobytes()


@pytest.mark.parametrize(
    "settings",
    [ScalarSettings(), ProductSettings(num_bits=4), ListsSettings(num_lists=5)],
    ids=lambda value: value.name,
)
def test_what_was_learnt_is_outgrown_fourfold(settings: IndexSettings) -> None:
    index = built(settings, VECTORS[:300])
    index.add(np.arange(300, 1199), VECTORS[300:1199])
    assert not index.is_outgrown
    index.add(np.array([1199]), VECTORS[1199:1200])
    assert index.is_outgrown


def test_what_was_learnt_is_outgrown_by_turnover() -> None:
    index = built(ScalarSettings(), VECTORS[:300])
    for start in range(300, 1200, 100):
        assert not index.is_outgrown
        index.remove(np.arange(start - 300, start - 200))
        index.add(np.arange(start, start + 100), VECTORS[start : start + 100])
    assert len(index) == 300
    assert index.is_outgrown


def test_lists_are_outgrown_from_both_sides() -> None:
    assert not built(ListsSettings(), VECTORS[:1599]).is_outgrown
    index = built(ListsSettings(), VECTORS[:1599])
    index.add(np.array([1599]), VECTORS[1599:1600])
    assert index.is_outgrown
    learnt = built(ListsSettings())
    learnt.remove(np.arange(1500))
    assert not learnt.is_outgrown
    learnt.remove(np.array([1500]))
    assert learnt.is_outgrown


def test_a_graph_is_outgrown_by_its_dead() -> None:
    index = built(GraphSettings(), VECTORS[:400])
    index.remove(np.arange(100))
    assert not index.is_outgrown
    index.remove(np.array([100]))
    assert index.is_outgrown


@pytest.mark.parametrize("name", ["pq", "ivf"])
def test_learning_warns_of_nothing(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    cases: dict[str, list[tuple[IndexSettings, int]]] = {
        "pq": [(ProductSettings(), 1024), (ProductSettings(num_bits=4), 64)],
        "ivf": [(ListsSettings(), 1600), (ListsSettings(num_lists=10), 400)],
    }
    for settings, num_vectors in cases[name]:
        built(settings, VECTORS[:num_vectors])
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
