"""The store against brute force: order, ties, huge distances, refusals."""

from collections.abc import Callable

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from knnper.datastore.examples import NewExamples
from knnper.datastore.index import NUMBERS_AT_ONCE, QUERIES_AT_ONCE
from knnper.datastore.store import Store, memory_store
from knnper.errors import DataError
from knnper.seeding import RandomKey


def store_of(embeddings: list[list[float]], labels: list[int], dim: int = 2) -> Store:
    rows = torch.tensor(embeddings, dtype=torch.float32).reshape(-1, dim)
    return memory_store(rows, torch.tensor(labels, dtype=torch.int64), 3)


def brute_force(
    embeddings: Tensor, queries: Tensor, k: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Squared distances and ids of the k nearest; of equal ones the smaller id."""
    stored = embeddings.numpy().astype(np.float64)
    asked = queries.numpy().astype(np.float64)
    distances = ((asked[:, None] - stored[None]) ** 2).sum(axis=2)
    ids = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances, ids, axis=1), ids + 1


def normal(purpose: str, *shape: int) -> Tensor:
    drawn = RandomKey(3, (purpose,)).numpy().normal(size=shape)
    return torch.from_numpy(drawn.astype("float32"))


def test_neighbours_by_hand() -> None:
    store = store_of([[0, 0], [3, 4], [0, 2]], [2, 1, 0])
    found = store.search(torch.tensor([[0.0, 0.0], [3.0, 3.0]]), 2)
    assert found.squared_distances.tolist() == [[0.0, 4.0], [1.0, 10.0]]
    assert found.ids.tolist() == [[1, 3], [2, 3]]
    assert found.labels.tolist() == [[2, 0], [1, 0]]


def check(embeddings: Tensor, queries: Tensor, count: int, rtol: float = 1e-12) -> None:
    """Compare a search of all embeddings with brute force."""
    store = memory_store(embeddings, torch.arange(len(embeddings)) % 7, 7)
    found = store.search(queries, count)
    distances, ids = brute_force(embeddings, queries, count)
    assert np.array_equal(found.ids.numpy(), ids)
    assert torch.equal(found.labels, (found.ids - 1) % 7)
    np.testing.assert_allclose(found.squared_distances.numpy(), distances, rtol=rtol)


@pytest.mark.parametrize("num_queries", [0, 1, QUERIES_AT_ONCE, 50])
@pytest.mark.parametrize("num_neighbors", [1, 10, 200])
def test_search_equals_brute_force(num_queries: int, num_neighbors: int) -> None:
    check(normal("store", 300, 24), normal("queries", num_queries, 24), num_neighbors)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-2, 2), min_size=1, max_size=200),
    asked=st.lists(st.integers(-3, 3), min_size=1, max_size=25),
    num_neighbors=st.integers(1, 120),
)
def test_ties_go_to_the_smaller_id(
    values: list[int], asked: list[int], num_neighbors: int
) -> None:
    embeddings = torch.tensor(values, dtype=torch.float32)[:, None]
    queries = torch.tensor(asked, dtype=torch.float32)[:, None]
    check(embeddings, queries, num_neighbors, rtol=0)


def test_distances_that_are_equal_in_float32_only_are_told_apart() -> None:
    # All squared distances lie between 1 and the next float32, the last id nearest.
    offsets = torch.linspace(3.4e-4, 2.5e-4, 40)
    embeddings = torch.stack([torch.ones(40), offsets], dim=1)
    store = memory_store(embeddings, torch.zeros(40, dtype=torch.int64), 1)
    assert store.search(torch.zeros(1, 2), 3).ids.tolist() == [[40, 39, 38]]


def test_ties_that_float32_breaks_go_to_the_smaller_id() -> None:
    # Permuted coordinates: their squares sum up to the same number in any order,
    # but not in float32.
    generator = RandomKey(4).numpy()
    row = generator.integers(1, 2**15, 1280) / 2**12
    rows = np.stack([generator.permutation(row) for _ in range(30)])
    embeddings = torch.from_numpy(rows.astype("float32"))
    store = memory_store(embeddings, torch.zeros(30, dtype=torch.int64), 1)
    assert store.search(torch.zeros(1, 1280), 30).ids.tolist() == [list(range(1, 31))]


def test_a_query_does_not_depend_on_the_other_queries() -> None:
    labels, queries = torch.zeros(200, dtype=torch.int64), normal("queries", 45, 33)
    store = memory_store(normal("store", 200, 33), labels, 1)
    together = store.search(queries, 12)
    alone = [store.search(query[None], 12) for query in queries]
    distances = torch.cat([one.squared_distances for one in alone])
    assert torch.equal(together.squared_distances, distances)
    assert torch.equal(together.ids, torch.cat([one.ids for one in alone]))


def test_small_distances_between_large_vectors_are_exact() -> None:
    # ‖q‖² + ‖y‖² - 2qy in float32 has no correct digit here.
    embeddings, queries = normal("store", 300, 24), normal("queries", 40, 24)
    check(100 + 1e-3 * embeddings, 100 + 1e-3 * queries, 10)


@pytest.mark.parametrize("scale", [1e-25, 1e6, 1e18, 1e20, 3e37])
def test_tiny_and_huge_distances_keep_their_order(scale: float) -> None:
    embeddings, queries = normal("store", 60, 5), normal("queries", 20, 5)
    check(embeddings * torch.tensor(scale), queries * torch.tensor(scale), 7)


@pytest.mark.parametrize("distance", [1e6, 1e18, 1e20])
def test_queries_far_from_all_examples_find_k_of_them(distance: float) -> None:
    store = memory_store(normal("store", 60, 4), torch.zeros(60, dtype=torch.int64), 1)
    found = store.search(torch.full((30, 4), distance), 7)
    assert all(len(set(ids)) == 7 for ids in found.ids.tolist())
    np.testing.assert_allclose(
        found.squared_distances.numpy(), 4 * distance**2, rtol=1e-5
    )


def test_the_store_does_not_share_memory_with_its_arguments() -> None:
    embeddings, labels = torch.zeros(1, 2), torch.tensor([1])
    store = memory_store(embeddings, labels, 3)
    embeddings.fill_(5.0)
    labels.fill_(2)
    found = store.search(torch.zeros(1, 2), 1)
    assert found.squared_distances.tolist() == [[0.0]]
    assert found.labels.tolist() == [[1]]


def test_slices_and_transposes_are_searched_as_what_they_show() -> None:
    embeddings, queries = normal("store", 4, 30).T, normal("queries", 40, 8)[::2, ::2]
    store = memory_store(embeddings, torch.zeros(30, dtype=torch.int64), 1)
    assert np.array_equal(
        store.search(queries, 3).ids.numpy(), brute_force(embeddings, queries, 3)[1]
    )


def test_faiss_runs_in_one_thread() -> None:
    faiss.omp_set_num_threads(2)
    store = store_of([[0, 0]], [1])
    assert faiss.omp_get_max_threads() == 1
    faiss.omp_set_num_threads(2)
    store.search(torch.zeros(1, 2), 1)
    assert faiss.omp_get_max_threads() == 1


@pytest.mark.parametrize("dim", [24, 1280, NUMBERS_AT_ONCE // QUERIES_AT_ONCE])
def test_faiss_sums_squared_differences_for_so_few_queries(dim: int) -> None:
    embeddings = 100 + 1e-3 * normal("store", 50, dim)
    queries = 100 + 1e-3 * normal("queries", QUERIES_AT_ONCE, dim)
    index = faiss.IndexFlatL2(dim)
    index.add(embeddings.numpy())
    distances, _ = index.search(queries.numpy(), 5)
    np.testing.assert_allclose(
        distances, brute_force(embeddings, queries, 5)[0], rtol=1e-5
    )


ROWS, LABEL = torch.zeros(1, 2), torch.tensor([1])
NAN = torch.tensor([[0.0, 0.0], [0.0, torch.nan]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.search(NAN, 1), "queries: expected finite.* in row 1"),
        (lambda store: store.search(torch.zeros(1, 3), 1), "queries: .* 2 .* found 3"),
        (lambda store: store.search(torch.zeros(2), 1), "queries: expected float32"),
        (lambda store: store.search(ROWS.double(), 1), "queries: expected float32"),
        (
            lambda store: store.add(NewExamples(NAN, torch.tensor([1, 1]))),
            "embeddings to add: expected finite.* in row 1",
        ),
        (
            lambda store: store.add(NewExamples(torch.zeros(1, 3), LABEL)),
            "embeddings to add: expected 2 .* found 3",
        ),
        (lambda _: memory_store(NAN, LABEL, 2), "embeddings to store: .* in row 1;"),
        (lambda _: memory_store(NAN * torch.inf, LABEL, 2), "to store: .* in row 0;"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    call: Callable[[Store], object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        call(store_of([[0, 0]], [1]))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1]), "int64 of shape"),
        (torch.tensor([0.0]), "int64 of shape"),
        (torch.tensor([[0]]), "int64 of shape"),
        (torch.tensor([-1]), "found -1 in row 0"),
        (torch.tensor([3]), "found 3 in row 0"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=f"labels: expected .*{message}"):
        memory_store(ROWS, labels, 3)


def test_no_neighbours_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="at least one neighbour, found 0"):
        store_of([[0, 0]], [1]).search(ROWS, 0)
