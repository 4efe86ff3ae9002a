"""Every kind of index against a dictionary of vectors and brute force."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore.examples import StoreDamagedError
from knnper.datastore.index import (
    NOTHING,
    FactorySettings,
    FlatIndex,
    FlatSettings,
    IndexSettings,
    VectorIndex,
    Vectors,
)
from knnper.datastore.local_memory import LocalMemory
from knnper.datastore.search import nearest
from knnper.errors import ConfigError
from tests.datastore.index_kinds import GRAPH, HALF, KINDS, LISTS, PRODUCT, SCALAR

DIM, NUM_VECTORS = 8, 300


def clustered(num_vectors: int, dim: int = DIM, seed: int = 0) -> Vectors:
    """Draw vectors around 20 centres, float32 of shape (n, p)."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(20, dim))
    chosen = centres[rng.integers(0, 20, num_vectors)]
    noise = 0.4 * rng.normal(size=(num_vectors, dim))
    return (chosen + noise).astype(np.float32)


def squared_distances(queries: Vectors, vectors: Vectors) -> Vectors:
    """Compute float64 distances, shape (m, n)."""
    difference = queries[:, None].astype(np.float64) - vectors[None]
    distances: Vectors = np.square(difference).sum(axis=2)
    return distances


QUERIES = clustered(40, seed=1)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def build(kind: IndexSettings, vectors: Vectors, first_id: int = 1) -> VectorIndex:
    ids = np.arange(first_id, first_id + len(vectors))
    return kind.build(vectors.shape[1], ids, vectors)


def recall(index: VectorIndex, vectors: Vectors, count: int = 10) -> float:
    """Compute the fraction of the nearest vectors that are found; ids from 0."""
    queries = clustered(100, vectors.shape[1], seed=1)
    expected = squared_distances(queries, vectors).argsort(axis=1)[:, :count]
    ids = index.candidates(queries, count).ids
    pairs = zip(expected.tolist(), ids.tolist(), strict=True)
    return sum(len(set(row) & set(other)) for row, other in pairs) / expected.size


def require_contents(
    kind: IndexSettings, index: VectorIndex, expected: dict[int, Vectors]
) -> None:
    """Compare an index with its expected contents, and its search with brute force."""
    assert len(index) == len(expected)
    assert sorted(index.ids.tolist()) == sorted(expected)
    if not expected:
        return
    ids = np.array(sorted(expected), np.int64)
    vectors = np.stack([expected[number] for number in ids])
    if isinstance(index, FlatIndex):
        kept = index.vectors(ids[::-1].copy())[::-1]
        assert kept.tobytes() == vectors.tobytes()
    count = min(5, len(expected))
    rough, ids_found = index.candidates(QUERIES[:4], count)
    assert rough.shape == ids_found.shape == (4, count)
    living = ids_found != NOTHING
    assert np.isin(ids_found[living], ids).all()
    assert all(len(set(row) - {NOTHING}) == np.sum(row != NOTHING) for row in ids_found)
    assert all((np.diff(row[row < np.inf]) >= 0).all() for row in rough)
    if kind in (KINDS["flat"], KINDS["graph"]):
        distances = squared_distances(QUERIES[:4], vectors)
        exact = np.take_along_axis(distances, np.searchsorted(ids, ids_found), axis=1)
        np.testing.assert_allclose(rough, exact, rtol=1e-4)
        best = np.sort(distances, axis=1)[:, :count]
        np.testing.assert_allclose(rough, best, rtol=1e-4)


@every_kind
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_index_follows_any_changes(
    kind: IndexSettings, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    num_first = data.draw(st.sampled_from([0, 5, NUM_VECTORS]))
    vectors = clustered(NUM_VECTORS + 60)
    index = build(kind, vectors[:num_first])
    expected = {row + 1: vectors[row] for row in range(num_first)}
    path = tmp_path_factory.mktemp("index") / "file"
    for step in range(4):
        num_added = data.draw(st.integers(0, 10))
        ids = 1000 * step + 500 + np.arange(num_added)
        added = vectors[NUM_VECTORS + 10 * step :][:num_added]
        index.add(ids, added)
        expected.update(zip(ids.tolist(), added, strict=True))
        known = sorted(expected)
        removed = data.draw(st.sets(st.sampled_from(known))) if known else set()
        index.remove(np.array(sorted(removed), np.int64))
        expected = {key: row for key, row in expected.items() if key not in removed}
        if data.draw(st.booleans()):
            index.write(path)
            index = kind.read(path, DIM)
        require_contents(kind, index, expected)


@every_kind
def test_read_index_searches_like_the_written_one(
    kind: IndexSettings, tmp_path: Path
) -> None:
    index = build(kind, clustered(NUM_VECTORS))
    index.remove(np.arange(20, 60))
    index.write(tmp_path / "index")
    again = kind.read(tmp_path / "index", DIM)
    before, after = index.candidates(QUERIES, 10), again.candidates(QUERIES, 10)
    assert before.rough.tobytes() == after.rough.tobytes()
    assert before.ids.tobytes() == after.ids.tobytes()
    assert again.is_outgrown == index.is_outgrown
    assert len(list(tmp_path.iterdir())) == 1


@every_kind
def test_builds_are_equal_and_queries_independent(
    kind: IndexSettings, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        index = build(kind, clustered(NUM_VECTORS))
        index.write(tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    rough, ids = index.candidates(QUERIES, 10)
    for row in range(len(QUERIES)):
        alone = index.candidates(QUERIES[row : row + 1], 10)
        assert alone.rough.tobytes() == rough[row].tobytes()
        assert alone.ids.tolist() == [ids[row].tolist()]


def test_flat_index_erases_removed_vectors(tmp_path: Path) -> None:
    vectors = clustered(NUM_VECTORS)
    index = build(FlatSettings(), vectors)
    index.remove(np.array([3, 150, 300]))
    index.write(tmp_path / "index")
    content = (tmp_path / "index").read_bytes()
    assert index.forgets
    assert vectors[3].tobytes() in content
    for row in (2, 149, 299):
        assert vectors[row].tobytes() not in content


@every_kind
def test_removed_id_can_be_added_again(kind: IndexSettings) -> None:
    vectors = clustered(NUM_VECTORS)
    index = build(kind, vectors)
    index.remove(np.array([7]))
    index.add(np.array([7]), vectors[100:101])
    ids = index.candidates(vectors[100:101], 10).ids
    assert {7, 101} <= set(ids[0].tolist())


@pytest.mark.parametrize("kind", [KINDS["flat"], GRAPH], ids=["flat", "graph"])
def test_extreme_vectors_do_not_hide_others(kind: IndexSettings) -> None:
    vectors = clustered(NUM_VECTORS)
    vectors[4], vectors[5], vectors[6] = 3e38, -3e38, 1e25
    index = build(kind, vectors)
    assert index.candidates(vectors[10:11], 1).ids.tolist() == [[11]]
    index.remove(np.array([5, 6, 7]))
    assert len(index) == NUM_VECTORS - 3


@every_kind
def test_read_refuses_a_foreign_or_damaged_file(
    kind: IndexSettings, tmp_path: Path
) -> None:
    path = tmp_path / "index"
    build(kind, clustered(NUM_VECTORS)).write(path)
    with pytest.raises(StoreDamagedError, match=r"\(.*, 8, .*\), expected \(.*, 16, "):
        kind.read(path, 2 * DIM)
    content = path.read_bytes()
    for part in (0.0, 0.003, 0.3, 0.7, 0.999, 1.5):
        path.write_bytes((2 * content)[: int(part * len(content))])
        with pytest.raises(StoreDamagedError, match="rebuild it from the vectors"):
            kind.read(path, DIM)


def test_read_refuses_another_kind(tmp_path: Path) -> None:
    kinds = [HALF, SCALAR, PRODUCT, GRAPH, LISTS]
    for kind in kinds:
        build(kind, clustered(NUM_VECTORS)).write(tmp_path / "index")
        for other in kinds:
            if other is not kind:
                with pytest.raises(StoreDamagedError, match="another index"):
                    other.read(tmp_path / "index", DIM)


def test_read_refuses_a_damaged_head(tmp_path: Path) -> None:
    path, flat = tmp_path / "index", FlatSettings()
    with pytest.raises(StoreDamagedError, match="No such file"):
        flat.read(path, DIM)
    build(flat, clustered(3)).write(path)
    content = path.read_bytes()

    def counted(count: int, ids: bytes) -> bytes:
        return content[:8] + np.int64(count).tobytes() + content[16:32] + ids

    for damaged, message in (
        (b"an index of some sort, but of whom?", "expected the mark"),
        (counted(-1, content[32:]), r"expected -?\d+ bytes, found"),
        (counted(2**60, content[32:]), r"expected -?\d+ bytes, found"),
        (counted(2, content[40:]), "another index"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(StoreDamagedError, match=message):
            flat.read(path, DIM)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@every_kind
def test_write_reports_a_full_disk(kind: IndexSettings) -> None:
    index = kind.build(DIM, np.arange(3), clustered(3))
    with pytest.raises(OSError, match="No space left"):
        index.write(Path("/dev/full"))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (FlatSettings(), 1.0),
        (HALF, 0.995),
        (SCALAR, 0.95),
        pytest.param(
            FactorySettings("PQ16x6", train_size=256),
            0.5,
            marks=pytest.mark.integration,
        ),
        (GRAPH, 0.97),
        (FactorySettings("IVF44,Flat", parameters="nprobe=8"), 0.97),
    ],
)
def test_recall(kind: IndexSettings, expected: float) -> None:
    vectors = clustered(2000, dim=32)
    assert recall(build(kind, vectors, first_id=0), vectors) >= expected


def test_parameters_reach_faiss() -> None:
    vectors = clustered(2000, dim=32)
    few, all_lists = (
        build(FactorySettings("IVF44,Flat", parameters=f"nprobe={n}"), vectors, 0)
        for n in (1, 44)
    )
    assert recall(few, vectors) < 0.9
    assert recall(all_lists, vectors) == 1.0


def test_graph_finds_the_nearest_of_few_left() -> None:
    vectors = clustered(2000, dim=32)
    index = build(GRAPH, vectors, first_id=0)
    removed = np.random.default_rng(0).permutation(2000)[:1600]
    index.remove(removed)
    left = vectors.copy()
    left[removed] = 1e6
    assert recall(index, left) >= 0.95


def test_rough_distances_of_flat_do_not_cancel() -> None:
    """A difference of 1 beside 10^4 is lost where distances are expanded."""
    dim, num_vectors = 2048, 100
    steps = np.arange(num_vectors)[:, None] * np.ones((1, dim))
    vectors = (1e4 + steps).astype(np.float32)
    rough, ids = build(FlatSettings(), vectors, 0).candidates(vectors, 3)
    assert ids[:, 0].tolist() == list(range(num_vectors))
    assert rough[10].tolist() == [0, dim, dim]


@pytest.mark.parametrize("dim", [7, 2048])
def test_rough_distances_of_flat_keep_their_bound(dim: int) -> None:
    vectors, queries = clustered(60, dim), clustered(30, dim, seed=1)
    rough, ids = build(FlatSettings(), vectors, 0).candidates(queries, 60)
    exact = squared_distances(queries, vectors)
    exact = np.take_along_axis(exact, ids, axis=1)
    eps = np.finfo(np.float32).eps
    assert (np.abs(rough.astype(np.float64) - exact) <= (dim + 8) * eps * exact).all()


@pytest.mark.parametrize(
    "vectors",
    [
        clustered(200),
        np.float32(1e-42) * clustered(200),
        np.float32(1e15) * clustered(200),
        np.repeat(clustered(40), 5, axis=0),
        (1 + 1e-4 * clustered(200)).astype(np.float32),
    ],
    ids=["usual", "subnormal", "large", "duplicates", "close"],
)
def test_nearest_equals_brute_force(vectors: Vectors) -> None:
    first = vectors[:-10]
    index = FlatSettings().build(DIM, np.arange(len(first)), first)
    removed = np.arange(5, len(vectors), 7)[:-2]
    index.remove(removed)
    index.add(np.arange(len(first), len(vectors)), vectors[-10:])
    left = np.setdiff1d(np.arange(len(vectors)), removed)
    queries = vectors[::3] * np.float32(1.001)
    distances = squared_distances(queries, vectors[left])
    order = np.argsort(distances, axis=1, kind="stable")[:, :6]
    nearest_distances, ids = nearest(queries, index, FlatSettings(), 6, index.vectors)
    np.testing.assert_array_equal(ids, left[order])
    np.testing.assert_allclose(
        nearest_distances, np.take_along_axis(distances, order, axis=1)
    )


def test_index_is_exact_until_it_can_be_trained() -> None:
    vectors = clustered(100)
    index = build(SCALAR, vectors[:15])
    exact = build(FlatSettings(), vectors[:15]).candidates(QUERIES, 3)
    assert index.candidates(QUERIES, 3).rough.tobytes() == exact.rough.tobytes()
    assert not index.is_outgrown
    index.add(np.array([99]), vectors[99:])
    assert index.is_outgrown
    assert not build(SCALAR, vectors[:16]).is_outgrown


def test_index_is_outgrown_by_additions_and_removals() -> None:
    vectors = clustered(120)
    index = build(SCALAR, vectors[:20])
    index.add(np.arange(100, 159), vectors[20:79])
    assert not index.is_outgrown
    index.add(np.array([200]), vectors[79:80])
    assert index.is_outgrown
    graph = build(GRAPH, vectors[:100])
    graph.remove(np.arange(1, 26))
    assert not graph.is_outgrown
    graph.remove(np.array([26]))
    assert graph.is_outgrown


def test_index_that_cannot_be_trained_stays_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = FactorySettings("IVF64,Flat", train_size=32)
    index = build(kind, clustered(40))
    assert "cannot be trained on 40 examples" in caplog.text
    exact = build(FlatSettings(), clustered(40)).candidates(QUERIES, 3)
    assert index.candidates(QUERIES, 3).ids.tolist() == exact.ids.tolist()


@pytest.mark.parametrize(
    ("factory", "parameters"), [("HMSW16", ""), ("PQ5", ""), ("HNSW16", "efsearch=x")]
)
def test_settings_that_faiss_refuses_are_named(factory: str, parameters: str) -> None:
    kind = FactorySettings(factory, parameters=parameters)
    with pytest.raises(ConfigError, match=f"found factory '{factory}'"):
        build(kind, clustered(3))


def test_bytes_of_a_vector() -> None:
    kinds = ("flat", "graph", "lists", "half", "scalar", "product")
    sizes = [KINDS[name].code_bytes(512) for name in kinds]
    assert sizes == [2048, 2048 + 4 * 2 * 16, 2048 + 8, 1024, 512, 1]


def test_half_precision_keeps_numbers_beyond_its_range_findable() -> None:
    features = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32) * 1e5
    store = {"index": {"name": "factory", "factory": "SQfp16", "rerank": 8}}
    memory = LocalMemory(store=store).fit(features, np.arange(60) % 3)
    assert memory.neighbors(features[:1]).indices[0, 0] == 0
