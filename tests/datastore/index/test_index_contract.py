"""What every kind of index does, against a dictionary of vectors."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore.examples import Ids
from knnper.datastore.index import (
    NOTHING,
    IndexSettings,
    ProductSettings,
    VectorIndex,
    Vectors,
)
from tests.datastore.index.index_cases import (
    CASES,
    DIM,
    NUM_LEARNT,
    case_name,
    clustered,
    keeps_vectors,
    squared_distances,
)

every_kind = pytest.mark.parametrize("case", CASES, ids=case_name)
QUERIES = clustered(40, seed=1)


def build(case: IndexSettings, vectors: Vectors, first_id: int = 1) -> VectorIndex:
    ids = np.arange(first_id, first_id + len(vectors))
    return case.build(vectors.shape[1], ids, vectors)


def check(
    case: IndexSettings, index: VectorIndex, expected: dict[int, Vectors]
) -> None:
    """Compare ``index`` with what it should hold."""
    assert len(index) == len(expected)
    assert sorted(index.ids.tolist()) == sorted(expected)
    if not expected:
        return
    ids = np.array(list(expected), np.int64)[::-1].copy()
    found = index.vectors(ids)
    assert found.shape == (len(ids), DIM)
    assert found.dtype == np.float32
    originals = np.stack([expected[number] for number in ids.tolist()])
    if keeps_vectors(case):
        assert found.tobytes() == originals.tobytes()
    check_search(case, index, ids, found, min(5, len(expected)))


def check_search(
    case: IndexSettings, index: VectorIndex, ids: Ids, vectors: Vectors, count: int
) -> None:
    """Compare candidates with brute force over ``vectors``, as the index keeps them."""
    rough, found = index.candidates(QUERIES[:4], count)
    assert rough.shape == found.shape == (4, count)
    distances = squared_distances(QUERIES[:4], vectors)
    position = {number: place for place, number in enumerate(ids.tolist())}
    for row in range(4):
        places = [position[number] for number in found[row].tolist()]
        assert len(set(places)) == count
        np.testing.assert_allclose(rough[row], distances[row][places], rtol=1e-4)
        assert (np.diff(rough[row]) >= 0).all()
        if case.name not in ("hnsw", "ivf"):
            nearest = np.sort(distances[row])[:count]
            np.testing.assert_allclose(rough[row], nearest, rtol=1e-4)


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
def test_two_builds_are_equal(case: IndexSettings, tmp_path: Path) -> None:
    vectors = clustered(NUM_LEARNT)
    for name in ("one", "two"):
        build(case, vectors).write(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@every_kind
def test_a_query_is_answered_the_same_in_any_company(case: IndexSettings) -> None:
    index = build(case, clustered(NUM_LEARNT))
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
def test_no_queries_find_nothing(case: IndexSettings) -> None:
    index = build(case, clustered(NUM_LEARNT))
    rough, ids = index.candidates(QUERIES[:0], 3)
    assert rough.shape == ids.shape == (0, 3)
    assert index.vectors(np.empty(0, np.int64)).shape == (0, DIM)


@every_kind
def test_all_can_be_found(case: IndexSettings) -> None:
    index = build(case, clustered(NUM_LEARNT))
    index.remove(np.arange(1, 200))
    _, ids = index.candidates(QUERIES, len(index))
    assert NOTHING not in ids
    assert (np.sort(ids, axis=1) == np.arange(200, NUM_LEARNT + 1)).all()


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


def test_only_what_learns_nothing_forgets() -> None:
    forgetting = {case.name for case in CASES if build(case, clustered(3)).forgets}
    assert forgetting == {"flat", "fp16"}


@every_kind
def test_an_id_may_come_back_with_another_vector(case: IndexSettings) -> None:
    vectors = clustered(NUM_LEARNT)
    index = build(case, vectors)
    index.remove(np.array([7]))
    index.add(np.array([7]), vectors[100:101])
    ids = np.array([7, 101])
    assert index.vectors(ids)[0].tobytes() == index.vectors(ids)[1].tobytes()
    _, found = index.candidates(vectors[100:101], 2)
    assert sorted(found[0].tolist()) == [7, 101]


@every_kind
def test_vectors_whose_distances_overflow_are_kept(case: IndexSettings) -> None:
    vectors = clustered(NUM_LEARNT)
    vectors[4], vectors[5], vectors[6] = 3e38, -3e38, 1e25
    index = build(case, vectors)
    _, ids = index.candidates(vectors[10:11], 1)
    if keeps_vectors(case):
        assert ids.tolist() == [[11]]
        assert (index.vectors(np.array([5, 6, 7])) == vectors[4:7]).all()
    index.remove(np.array([5, 6, 7]))
    assert len(index) == NUM_LEARNT - 3


@every_kind
def test_bytes_grow_with_the_vectors(case: IndexSettings) -> None:
    small, large = build(case, clustered(300)), build(case, clustered(1300))
    per_vector = (large.num_bytes - small.num_bytes) / 1000
    assert case.code_bytes(DIM) <= per_vector <= case.code_bytes(DIM) + 60
