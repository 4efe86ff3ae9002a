"""What every kind of index does, against a dictionary of vectors."""

from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore import index as index_module
from knnper.datastore.examples import StoreDamagedError
from knnper.datastore.index import (
    INDEX_KINDS,
    FlatSettings,
    GraphSettings,
    HalfSettings,
    IndexSettings,
    ListsSettings,
    LossySettings,
    ProductSettings,
    ScalarSettings,
    VectorIndex,
    Vectors,
)
from knnper.datastore.search import nearest
from knnper.errors import ConfigError

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


def clustered(num_vectors: int, dim: int = DIM, seed: int = 0) -> Vectors:
    """Return vectors around 20 centres, float32 of shape (n, p)."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(20, dim))
    chosen = centres[rng.integers(0, 20, num_vectors)]
    noise = 0.4 * rng.normal(size=(num_vectors, dim))
    return (chosen + noise).astype(np.float32)


def squared_distances(queries: Vectors, vectors: Vectors) -> Vectors:
    """Return float64 distances, shape (m, n)."""
    difference = queries[:, None].astype(np.float64) - vectors[None]
    distances: Vectors = np.square(difference).sum(axis=2)
    return distances


every_kind = pytest.mark.parametrize("case", CASES, ids=lambda one: one.name)
QUERIES = clustered(40, seed=1)


def build(case: IndexSettings, vectors: Vectors, first_id: int = 1) -> VectorIndex:
    ids = np.arange(first_id, first_id + len(vectors))
    return case.build(vectors.shape[1], ids, vectors)


def check(
    case: IndexSettings, index: VectorIndex, expected: dict[int, Vectors]
) -> None:
    """Compare ``index`` with what it should hold, and candidates with brute force."""
    assert len(index) == len(expected)
    assert sorted(index.ids.tolist()) == sorted(expected)
    if not expected:
        return
    ids = np.array(sorted(expected), np.int64)
    kept = index.vectors(ids[::-1].copy())[::-1]
    assert kept.shape == (len(ids), DIM)
    assert kept.dtype == np.float32
    if not isinstance(case, LossySettings):
        assert kept.tobytes() == np.stack([expected[one] for one in ids]).tobytes()
    count = min(5, len(expected))
    rough, found = index.candidates(QUERIES[:4], count)
    assert rough.shape == found.shape == (4, count)
    assert all(len(set(row)) == count for row in found.tolist())
    assert (np.diff(rough) >= 0).all()
    distances = squared_distances(QUERIES[:4], kept)
    exact = np.take_along_axis(distances, np.searchsorted(ids, found), axis=1)
    np.testing.assert_allclose(rough, exact, rtol=1e-4)
    if case.name not in ("hnsw", "ivf"):
        nearest = np.sort(distances, axis=1)[:, :count]
        np.testing.assert_allclose(rough, nearest, rtol=1e-4)


@every_kind
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_changes_leave_what_they_should(
    case: IndexSettings, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    starts_with = data.draw(st.sampled_from([0, 5, NUM_LEARNT]))
    vectors = clustered(NUM_LEARNT + 60)
    index = build(case, vectors[:starts_with])
    expected = {place + 1: vectors[place] for place in range(starts_with)}
    path = tmp_path_factory.mktemp("index") / "file"
    for step in range(4):
        added = data.draw(st.integers(0, 10))
        ids = 1000 * step + 500 + np.arange(added)
        new = vectors[NUM_LEARNT + 10 * step :][:added]
        index.add(ids, new)
        expected.update(zip(ids.tolist(), new, strict=True))
        known = sorted(expected)
        gone = data.draw(st.sets(st.sampled_from(known))) if known else set()
        index.remove(np.array(sorted(gone), np.int64))
        expected = {key: one for key, one in expected.items() if key not in gone}
        if data.draw(st.booleans()):
            index.write(path)
            index = case.read(path, DIM)
        check(case, index, expected)


@every_kind
def test_what_was_written_searches_alike(case: IndexSettings, tmp_path: Path) -> None:
    index = build(case, clustered(NUM_LEARNT))
    index.remove(np.arange(20, 60))
    index.write(tmp_path / "index")
    again = case.read(tmp_path / "index", DIM)
    rough, ids = index.candidates(QUERIES, 10)
    again_rough, again_ids = again.candidates(QUERIES, 10)
    assert rough.tobytes() == again_rough.tobytes()
    assert ids.tobytes() == again_ids.tobytes()
    assert again.num_bytes == index.num_bytes
    assert again.is_outgrown == index.is_outgrown
    assert len(list(tmp_path.iterdir())) == 1


@every_kind
def test_two_builds_are_equal_and_know_no_company(
    case: IndexSettings, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        index = build(case, clustered(NUM_LEARNT))
        index.write(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    # A query is answered the same in any company.
    rough, ids = index.candidates(QUERIES, 10)
    for row in range(len(QUERIES)):
        alone_rough, alone_ids = index.candidates(QUERIES[row : row + 1], 10)
        assert alone_rough.tobytes() == rough[row].tobytes()
        assert alone_ids.tolist() == [ids[row].tolist()]


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_long_parts_do_not_depend_on_the_company_either(num_parts: int) -> None:
    dim, num_vectors = 64, 100
    case = ProductSettings(num_parts=num_parts, num_bits=4)
    index = build(case, clustered(num_vectors, dim))
    queries = clustered(40, dim, seed=1)
    rough, _ = index.candidates(queries, 10)
    alone = [index.candidates(queries[row : row + 1], 10)[0] for row in range(40)]
    assert np.concatenate(alone).tobytes() == rough.tobytes()


@every_kind
def test_removed_vectors_are_not_in_the_file(
    case: IndexSettings, tmp_path: Path
) -> None:
    vectors = clustered(NUM_LEARNT)
    index = build(case, vectors)
    codes = {number: index.vectors(np.array([number])) for number in (3, 150, 300)}
    index.remove(np.array([3, 150, 300]))
    index.write(tmp_path / "index")
    content = (tmp_path / "index").read_bytes()
    if case.name == "hnsw":
        assert not index.forgets
        return
    for number, vector in codes.items():
        assert vectors[number - 1].tobytes() not in content
        assert vector.astype(np.float16).tobytes() not in content


@every_kind
def test_an_id_may_come_back_and_all_can_be_found(case: IndexSettings) -> None:
    vectors = clustered(NUM_LEARNT)
    index = build(case, vectors)
    index.remove(np.array([7]))
    index.add(np.array([7]), vectors[100:101])
    ids = np.array([7, 101])
    assert index.vectors(ids)[0].tobytes() == index.vectors(ids)[1].tobytes()
    _, found = index.candidates(vectors[100:101], 2)
    assert sorted(found[0].tolist()) == [7, 101]
    index.remove(np.arange(1, 200))
    _, found = index.candidates(QUERIES, len(index))
    assert (np.sort(found, axis=1) == np.arange(200, NUM_LEARNT + 1)).all()


@every_kind
def test_vectors_whose_distances_overflow_are_kept(case: IndexSettings) -> None:
    vectors = clustered(NUM_LEARNT)
    vectors[4], vectors[5], vectors[6] = 3e38, -3e38, 1e25
    index = build(case, vectors)
    _, ids = index.candidates(vectors[10:11], 1)
    if not isinstance(case, LossySettings):
        assert ids.tolist() == [[11]]
        assert (index.vectors(np.array([5, 6, 7])) == vectors[4:7]).all()
    index.remove(np.array([5, 6, 7]))
    assert len(index) == NUM_LEARNT - 3


@every_kind
def test_bytes_grow_with_the_vectors(case: IndexSettings) -> None:
    small, large = build(case, clustered(300)), build(case, clustered(1300))
    per_vector = (large.num_bytes - small.num_bytes) / 1000
    assert case.code_bytes(DIM) <= per_vector <= case.code_bytes(DIM) + 60


@every_kind
def test_a_file_that_is_not_its_own_is_refused(
    case: IndexSettings, tmp_path: Path
) -> None:
    path = tmp_path / "index"
    build(case, clustered(NUM_LEARNT)).write(path)
    with pytest.raises(StoreDamagedError, match=r"\(.*, 8, .*\), expected \(.*, 16, "):
        case.read(path, 2 * DIM)
    for other in CASES:
        if other.name != case.name and not isinstance(case, FlatSettings):
            with pytest.raises(StoreDamagedError, match="another index"):
                other.read(path, DIM)
    content = path.read_bytes()
    for part in (0.0, 0.003, 0.3, 0.7, 0.999, 1.5):
        path.write_bytes((2 * content)[: int(part * len(content))])
        with pytest.raises(StoreDamagedError, match="build it anew from the vectors"):
            case.read(path, DIM)


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
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
def test_a_full_disk_is_an_error(case: IndexSettings) -> None:
    index = case.build(DIM, np.arange(3), clustered(3))
    with pytest.raises(OSError, match="No space left"):
        index.write(Path("/dev/full"))


NUM_VECTORS, LONG_DIM, COUNT = 2000, 32, 10
VECTORS = clustered(NUM_VECTORS, LONG_DIM)
LONG_QUERIES = clustered(100, LONG_DIM, seed=1)


def built(settings: IndexSettings, vectors: Vectors = VECTORS) -> VectorIndex:
    ids = np.arange(len(vectors))
    return settings.build(vectors.shape[1], ids, vectors)


def recall(index: VectorIndex, vectors: Vectors) -> float:
    """Return the part of the 10 nearest that is among 10 candidates."""
    nearest = squared_distances(LONG_QUERIES, vectors).argsort(axis=1)[:, :COUNT]
    _, found = index.candidates(LONG_QUERIES, COUNT)
    pairs = zip(nearest.tolist(), found.tolist(), strict=True)
    return sum(len(set(one) & set(other)) for one, other in pairs) / nearest.size


RECALLS: list[tuple[IndexSettings, float]] = [
    (FlatSettings(), 1.0),
    (HalfSettings(), 0.995),
    (ScalarSettings(), 0.95),
    (ProductSettings(num_parts=16), 0.7),
    (GraphSettings(), 0.97),
    (ListsSettings(), 0.97),
]


@pytest.mark.parametrize(("settings", "expected"), RECALLS)
def test_the_nearest_are_found(settings: IndexSettings, expected: float) -> None:
    assert recall(built(settings), VECTORS) >= expected


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
    nearest = squared_distances(LONG_QUERIES[:1], VECTORS)[0].argsort()
    index.remove(nearest[: NUM_VECTORS - 3])
    _, found = index.candidates(LONG_QUERIES[:1], 3)
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
    few = built(ScalarSettings(), VECTORS[:255])
    assert few.vectors(np.arange(255)).tobytes() == VECTORS[:255].tobytes()
    assert not built(ScalarSettings(), VECTORS[:256]).is_outgrown


def test_centroids_need_four_vectors_each() -> None:
    settings = ProductSettings(num_parts=4, num_bits=5)
    few = built(settings, VECTORS[:127])
    assert few.vectors(np.arange(127)).tobytes() == VECTORS[:127].tobytes()
    enough = built(settings, VECTORS[:128])
    assert enough.vectors(np.arange(128)).tobytes() != VECTORS[:128].tobytes()


@pytest.mark.parametrize(
    ("settings", "count", "removed", "added"),
    [
        # Enough to learn from, or four times what it has learnt from.
        (ScalarSettings(), 255, 0, 1),
        (ScalarSettings(), 300, 0, 900),
        (ProductSettings(num_bits=4), 300, 0, 900),
        (ListsSettings(num_lists=5), 300, 0, 900),
        (ListsSettings(), 1599, 0, 1),
        (ListsSettings(), 2000, 1501, 0),
        # Its dead.
        (GraphSettings(), 400, 101, 0),
    ],
)
def test_what_an_index_outgrows(
    settings: IndexSettings, count: int, removed: int, added: int
) -> None:
    index = built(settings, VECTORS[:count])
    ids = np.arange(removed) if removed else np.arange(count, count + added)
    for part in (ids[:-1], ids[-1:]):
        assert not index.is_outgrown
        if removed:
            index.remove(part)
        else:
            index.add(part, VECTORS[part])
    assert index.is_outgrown


def test_what_was_learnt_is_outgrown_by_turnover() -> None:
    index = built(ScalarSettings(), VECTORS[:300])
    for start in range(300, 1200, 100):
        assert not index.is_outgrown
        index.remove(np.arange(start - 300, start - 200))
        index.add(np.arange(start, start + 100), VECTORS[start : start + 100])
    assert len(index) == 300
    assert index.is_outgrown


def test_bytes_of_a_vector() -> None:
    sizes = [INDEX_KINDS[one.name]().code_bytes(512) for one in CASES]
    assert sizes == [2048, 1024, 512, 64, 2176, 2056]
    assert ProductSettings(num_parts=3, num_bits=5).code_bytes(12) == 2


@pytest.mark.parametrize(
    ("dim", "expected"), [(512, 64), (1280, 160), (20, 2), (7, 1), (37, 1), (1, 1)]
)
def test_parts_divide_the_embedding(dim: int, expected: int) -> None:
    assert ProductSettings().parts_of(dim) == expected


def test_parts_that_do_not_divide_are_refused() -> None:
    settings, vectors = ProductSettings(num_parts=5), clustered(3)
    with pytest.raises(ConfigError, match=r"found 5, .*divide 8.*one of 1, 2, 4, 8"):
        settings.build(8, vectors.argsort()[0][:3], vectors)


def test_lists_have_forty_vectors_and_an_eighth_is_probed() -> None:
    sizes = (0, 1599, 1600, 50_000)
    assert [ListsSettings().lists_for(one) for one in sizes] == [1, 1, 40, 224]
    ten = ListsSettings(num_lists=10)
    assert [ten.lists_for(one) for one in (399, 400)] == [1, 10]
    # An eighth of them is probed.
    assert [ListsSettings().probes_for(lists) for lists in (1, 40, 224)] == [1, 8, 28]
    assert ListsSettings(num_probes=3).probes_for(224) == 3
    assert ListsSettings(num_probes=300).probes_for(224) == 224


@pytest.fixture
def _halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every flat index keep halves, on any processor."""
    monkeypatch.setattr(index_module, "HALVED_FROM", 0)
    monkeypatch.setattr(
        faiss.SIMDConfig, "get_level_name", staticmethod(lambda: "AVX512")
    )


def _close_together(num_vectors: int) -> Vectors:
    """Return vectors that differ by less than half precision can say."""
    return (1 + 1e-4 * clustered(num_vectors)).astype(np.float32)


def _with_an_outlier(num_vectors: int) -> Vectors:
    vectors = clustered(num_vectors)
    vectors[0] = 1e9
    return vectors


@pytest.mark.usefixtures("_halved")
@pytest.mark.parametrize(
    ("vectors", "is_rounded"),
    [
        (clustered(200), True),
        (np.float32(1e-20) * clustered(200), True),
        (np.float32(1e-42) * clustered(200), True),
        (np.float32(1e15) * clustered(200), True),
        (np.repeat(clustered(40), 5, axis=0), True),
        (_close_together(200), True),
        (_with_an_outlier(200), True),
        (clustered(20), False),  # as few as the candidates
    ],
)
def test_halves_lose_no_neighbor(vectors: Vectors, is_rounded: bool) -> None:
    first = vectors[:-10]
    index = FlatSettings().build(DIM, np.arange(len(first)), first)
    removed = np.arange(5, len(vectors), 7)[:-2]
    index.remove(removed)
    index.add(np.arange(len(first), len(vectors)), vectors[-10:])
    left = np.setdiff1d(np.arange(len(vectors)), removed)
    queries = vectors[::3] * np.float32(1.001)
    distances = squared_distances(queries, vectors[left])
    order = np.argsort(distances, axis=1, kind="stable")[:, :6]
    found, ids = nearest(queries, index, FlatSettings(), 6, index.vectors)
    np.testing.assert_array_equal(ids, left[order])
    np.testing.assert_allclose(found, np.take_along_axis(distances, order, axis=1))
    rounding = index.candidates_with_vectors(queries, 10, may_round=True).rounding
    assert (rounding > 0) == is_rounded


@pytest.mark.usefixtures("_halved")
def test_vectors_out_of_the_range_of_halves_are_not_rounded() -> None:
    index = build(FlatSettings(), clustered(100))
    index.add(np.array([900]), np.full((1, DIM), 1e9, np.float32))
    assert not index.candidates_with_vectors(QUERIES, 10, may_round=True).rounding
    _, ids = nearest(
        np.full((1, DIM), 1e9, "f4"), index, FlatSettings(), 1, index.vectors
    )
    assert ids.tolist() == [[900]]


@pytest.mark.usefixtures("_halved")
def test_halves_are_counted_and_removed() -> None:
    index = build(FlatSettings(), clustered(100))
    more = build(FlatSettings(), clustered(101))
    assert more.num_bytes - index.num_bytes == 6 * DIM + 16
    index.remove(np.arange(1, 101))
    assert index.num_bytes == 0
