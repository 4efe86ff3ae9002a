import math
from collections.abc import Callable

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from torch import Tensor

from knnper.datastore.examples import NewExamples
from knnper.datastore.index import QUERIES_AT_ONCE, FlatSettings, IndexSettings
from knnper.datastore.policy import StoreSettings
from knnper.datastore.prediction import (
    KERNELS,
    KernelName,
    KnnPredictor,
    NeighborClassifier,
    interpolate,
    neighbor_vote,
)
from knnper.datastore.store import Store, memory_store
from knnper.errors import DataError
from knnper.seeding import RandomKey
from tests.datastore.index_kinds import GRAPH

KNN = torch.tensor([[1.0, 0.0], [0.3, 0.7]])
GLOBAL = torch.tensor([[0.2, 0.8], [0.6, 0.4]])


def test_a_scale_near_zero_leaves_shares_of_the_vote() -> None:
    store = memory_store(torch.tensor([[10.0], [20.0]]), torch.tensor([0, 1]), 2)
    vote = NeighborClassifier(store, 2, "paper", 1e-308).vote(torch.tensor([[0.0]]))
    assert vote.probabilities is not None
    assert vote.probabilities.tolist() == vote.weights.tolist() == [[0.5, 0.5]]


def test_the_ends_are_bit_identical() -> None:
    third = torch.softmax(torch.tensor([[0.1, 0.2, -0.3]]), dim=1)
    other = torch.softmax(torch.tensor([[2.1, -0.7, 1.3]]), dim=1)
    assert torch.equal(interpolate(third, other, 0.0), other)
    assert torch.equal(interpolate(third, other, 1.0), third)


@pytest.mark.parametrize(
    ("knn", "alone", "knn_weight", "message"),
    [
        (KNN, GLOBAL, -0.1, r"a knn_weight in \[0, 1\], found"),
        (KNN, GLOBAL, 1.1, r"a knn_weight in \[0, 1\], found"),
        (KNN, GLOBAL, float("nan"), r"a knn_weight in \[0, 1\], found"),
        (KNN, GLOBAL[:1], 0.5, r"shape \(2, 2\) and global .*\(1, 2\)"),
        (KNN[0], GLOBAL, 0.5, r"of shape \(n, c\), found shape \(2,\)"),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    knn: Tensor, alone: Tensor, knn_weight: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        interpolate(knn, alone, knn_weight)


@pytest.mark.parametrize("knn_weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("row", [[3.0, -2.0], [0.5, 0.6], [math.nan, 0.5]])
def test_logits_are_refused(row: list[float], knn_weight: float) -> None:
    logits = torch.tensor([[0.5, 0.5], row])
    with pytest.raises(ValueError, match=r"global probabilities: .* row 1; .*softmax"):
        interpolate(KNN, logits, knn_weight)
    with pytest.raises(ValueError, match=r"kNN probabilities: .* row 1; .*softmax"):
        interpolate(logits, GLOBAL, knn_weight)


SQUARED_DISTANCES = torch.tensor(
    [[0.0, 4.0, 25.0], [1e12, 1e36, 1e80]], dtype=torch.float64
)


@pytest.mark.parametrize(
    ("name", "kernel_scale", "expected"),
    [
        ("paper", 1.0, [[0.0, -2.0, -5.0], [-1e6, -1e18, -1e40]]),
        ("paper", 0.5, [[0.0, -4.0, -10.0], [-2e6, -2e18, -2e40]]),
        ("squared", 1.0, [[0.0, -0.5, -3.125], [-1.25e11, -1.25e35, -1.25e79]]),
        ("squared", 0.25, [[0.0, -2.0, -12.5], [-5e11, -5e35, -5e79]]),
    ],
)
def test_log_weights_by_hand(
    name: KernelName, kernel_scale: float, expected: list[list[float]]
) -> None:
    log_weights = KERNELS[name](SQUARED_DISTANCES, kernel_scale, 8)
    torch.testing.assert_close(
        log_weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )


NUM_CLASSES = 4


def vote_by_loop(
    log_weights: NDArray[np.float64], labels: NDArray[np.int64]
) -> NDArray[np.float64]:
    shares = np.zeros((len(labels), NUM_CLASSES))
    for row, (logs, its_labels) in enumerate(zip(log_weights, labels, strict=True)):
        weights = np.exp(logs - logs.max())
        for weight, label in zip(weights, its_labels, strict=True):
            shares[row, label] += weight / weights.sum()
    return shares


@st.composite
def weighted_neighbours(
    draw: st.DrawFn,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    shape = draw(st.tuples(st.integers(0, 5), st.integers(1, 12)))
    log_weights = draw(
        arrays.arrays(np.float64, shape, elements=st.floats(-1e300, 0, width=64))
    )
    labels = draw(arrays.arrays(np.int64, shape, elements=st.integers(0, 3)))
    return log_weights, labels


@settings(max_examples=80, deadline=None)
@given(neighbours=weighted_neighbours())
def test_the_vote_equals_the_loop_and_sums_to_one(
    neighbours: tuple[NDArray[np.float64], NDArray[np.int64]],
) -> None:
    log_weights, labels = neighbours
    vote = neighbor_vote(
        torch.from_numpy(log_weights), torch.from_numpy(labels), NUM_CLASSES
    ).numpy()
    np.testing.assert_allclose(vote, vote_by_loop(log_weights, labels), atol=1e-6)
    np.testing.assert_allclose(vote.sum(axis=1), 1.0, atol=1e-6)


def test_equal_neighbours_share_equally_at_any_distance() -> None:
    log_weights = torch.tensor([[-1e300, -1e300], [-math.inf, -math.inf]]).double()
    vote = neighbor_vote(log_weights, torch.tensor([[0, 1], [0, 1]]), 2)
    assert vote.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_no_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="store is empty, use the global model"):
        neighbor_vote(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="at least one neighbour, found 0"):
        line([0.0], [1]).search(torch.zeros(1, 1), 0)


def line(positions: list[float], labels: list[int]) -> Store:
    return memory_store(torch.tensor(positions)[:, None], torch.tensor(labels), 3)


def test_probabilities_by_hand() -> None:
    store = line([0.0, 3.0, 50.0], [2, 1, 0])
    probabilities = NeighborClassifier(store, 2, "squared", 4.5)(torch.zeros(1, 1))
    far = math.exp(-2)
    torch.testing.assert_close(probabilities, torch.tensor([[0, far, 1]]) / (1 + far))


def test_images_are_embedded_once_and_both_votes_mixed() -> None:
    embedded = list[int]()

    def embed(images: Tensor) -> Tensor:
        embedded.append(len(images))
        return images.flatten(1).float()

    alone = torch.tensor([[0.25, 0.75, 0.0]] * 2)
    neighbors = NeighborClassifier(line([10.0, 200.0], [0, 1]), 1, "paper", 1.0)
    probabilities = KnnPredictor(embed, lambda _: alone, neighbors, 0.25)(
        torch.tensor([[0], [255]])
    )
    expected = torch.tensor([[0.4375, 0.5625, 0.0], [0.1875, 0.8125, 0.0]])
    torch.testing.assert_close(probabilities, expected)
    assert embedded == [2]


def test_a_query_that_is_not_finite_is_refused() -> None:
    classifier = NeighborClassifier(line([7.0], [1]), 10, "paper", 1.0)
    with pytest.raises(DataError, match="NaN or infinity in row 0"):
        classifier(torch.tensor([[math.nan]]))


def store_of(embeddings: list[list[float]], labels: list[int], dim: int = 2) -> Store:
    rows = torch.tensor(embeddings, dtype=torch.float32).reshape(-1, dim)
    return memory_store(rows, torch.tensor(labels, dtype=torch.int64), 3)


def brute_force(
    embeddings: Tensor, queries: Tensor, k: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Squared distances and ids of the k nearest; of equal ones the smaller id."""
    stored = embeddings.numpy().astype(np.float64)
    points = queries.numpy().astype(np.float64)
    distances = ((points[:, None] - stored[None]) ** 2).sum(axis=2)
    ids = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances, ids, axis=1), ids + 1


def normal(purpose: str, *shape: int) -> Tensor:
    drawn = RandomKey(3, (purpose,)).numpy().normal(size=shape)
    return torch.from_numpy(drawn.astype("float32"))


def test_neighbours_by_hand() -> None:
    store = store_of([[0, 0], [3, 4], [0, 2]], [2, 1, 0])
    neighbors = store.search(torch.tensor([[0.0, 0.0], [3.0, 3.0]]), 2)
    assert neighbors.squared_distances.tolist() == [[0.0, 4.0], [1.0, 10.0]]
    assert neighbors.ids.tolist() == [[1, 3], [2, 3]]
    assert neighbors.labels.tolist() == [[2, 0], [1, 0]]


def check(embeddings: Tensor, queries: Tensor, count: int, rtol: float = 1e-12) -> None:
    """Compare a search of all embeddings with brute force."""
    store = memory_store(embeddings, torch.arange(len(embeddings)) % 7, 7)
    neighbors = store.search(queries, count)
    distances, ids = brute_force(embeddings, queries, count)
    assert np.array_equal(neighbors.ids.numpy(), ids)
    assert torch.equal(neighbors.labels, (neighbors.ids - 1) % 7)
    np.testing.assert_allclose(
        neighbors.squared_distances.numpy(), distances, rtol=rtol
    )


@pytest.mark.parametrize("num_queries", [0, 1, QUERIES_AT_ONCE, 50])
@pytest.mark.parametrize("num_neighbors", [1, 200])
def test_search_equals_brute_force(num_queries: int, num_neighbors: int) -> None:
    check(normal("store", 300, 24), normal("queries", num_queries, 24), num_neighbors)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-2, 2), min_size=1, max_size=200),
    query_values=st.lists(st.integers(-3, 3), min_size=1, max_size=25),
    num_neighbors=st.integers(1, 120),
)
def test_ties_go_to_the_smaller_id(
    values: list[int], query_values: list[int], num_neighbors: int
) -> None:
    embeddings = torch.tensor(values, dtype=torch.float32)[:, None]
    queries = torch.tensor(query_values, dtype=torch.float32)[:, None]
    check(embeddings, queries, num_neighbors, rtol=0)


def test_distances_equal_in_float32_only_are_distinguished() -> None:
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
    distances = torch.cat([result.squared_distances for result in alone])
    assert torch.equal(together.squared_distances, distances)
    assert torch.equal(together.ids, torch.cat([result.ids for result in alone]))


def test_small_distances_between_large_vectors_are_exact() -> None:
    # ‖q‖² + ‖y‖² - 2qy in float32 has no correct digit here.
    embeddings, queries = normal("store", 300, 24), normal("queries", 40, 24)
    check(100 + 1e-3 * embeddings, 100 + 1e-3 * queries, 10)


@pytest.mark.parametrize("scale", [1e-25, 1e6, 1e18, 1e20, 3e37])
def test_tiny_and_huge_distances_keep_their_order(scale: float) -> None:
    embeddings, queries = normal("store", 60, 5), normal("queries", 20, 5)
    check(embeddings * torch.tensor(scale), queries * torch.tensor(scale), 7)


def test_the_store_does_not_share_memory_with_its_arguments() -> None:
    embeddings, labels = torch.zeros(1, 2), torch.tensor([1])
    store = memory_store(embeddings, labels, 3)
    embeddings.fill_(5.0)
    labels.fill_(2)
    neighbors = store.search(torch.zeros(1, 2), 1)
    assert neighbors.squared_distances.tolist() == [[0.0]]
    assert neighbors.labels.tolist() == [[1]]


def test_slices_and_transposes_are_searched_as_what_they_show() -> None:
    embeddings, queries = normal("store", 4, 30).T, normal("queries", 40, 8)[::2, ::2]
    store = memory_store(embeddings, torch.zeros(30, dtype=torch.int64), 1)
    assert np.array_equal(
        store.search(queries, 3).ids.numpy(), brute_force(embeddings, queries, 3)[1]
    )


@pytest.mark.parametrize("index", [FlatSettings(), GRAPH], ids=["flat", "graph"])
def test_faiss_runs_in_one_thread(index: IndexSettings) -> None:
    faiss.omp_set_num_threads(2)
    embeddings, labels = torch.zeros(1, 2), torch.tensor([1])
    store = memory_store(embeddings, labels, 2, StoreSettings(index=index))
    # A flat index is an array, which is built without FAISS.
    assert faiss.omp_get_max_threads() == 1 or index == FlatSettings()
    faiss.omp_set_num_threads(2)
    store.search(embeddings, 1)
    assert faiss.omp_get_max_threads() == 1


ROWS, LABEL = torch.zeros(1, 2), torch.tensor([1])
NAN = torch.tensor([[0.0, 0.0], [0.0, torch.nan]])
NEW = NewExamples(NAN, torch.tensor([1, 1]))
LONG = NewExamples(torch.zeros(1, 3), LABEL)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.search(NAN, 1), "queries: expected finite.* in row 1"),
        (lambda store: store.search(torch.zeros(1, 3), 1), "queries: .* 2 .* found 3"),
        (lambda store: store.search(torch.zeros(2), 1), "queries: expected float32"),
        (lambda store: store.search(ROWS.double(), 1), "queries: expected float32"),
        (lambda store: store.add(NEW), "embeddings to add: expected finite.* in row 1"),
        (lambda store: store.add(LONG), "embeddings to add: expected 2 .* found 3"),
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


def test_search_reads_the_names_of_neighbours() -> None:
    store = memory_store(ROWS[:0], torch.empty(0, dtype=torch.int64), 3)
    names = ("near", None, "far")
    embeddings = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
    store.add(NewExamples(embeddings, torch.tensor([0, 1, 2]), external_ids=names))
    queries = torch.tensor([[4.0, 0.0], [0.1, 0.0]])
    assert store.search(queries, 2).names == ()
    found = store.search(queries, 2, with_names=True)
    assert found.names == [["far", None], ["near", None]]
    assert store.search(queries[:0], 2, with_names=True).names == []


@pytest.mark.parametrize("num_stored", [3, 5, 40])
def test_distances_beyond_float32_are_ranked(num_stored: int) -> None:
    embeddings = torch.zeros(num_stored, 4)
    embeddings[:, 0] = torch.arange(num_stored) * 1e30
    store = memory_store(embeddings, torch.zeros(num_stored, dtype=torch.int64), 1)
    found = store.search(embeddings[[1, -1]], 3).ids.tolist()
    last = num_stored
    assert found == [[2, 1, 3], [last, last - 1, last - 2]]
