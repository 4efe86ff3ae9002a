"""What a new client serves, against what can be counted by hand."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from knnper.datastore.tuning import candidates
from knnper.strategies.knn_per import KnnSettings
from papers.memory import (
    Embedded,
    NewClient,
    Service,
    count_correct,
    count_correct_with_each,
    size_at,
)
from tests.papers.clients_by_hand import NUM_CLASSES, head, new_client

KNN = KnnSettings(num_neighbors=4, kernel_scale=0.7)
SERVICE = Service(head, KNN, 0.25)


def votes(stored: Embedded, queries: Embedded, k: int, scale: float) -> NDArray[Any]:
    """Return p_kNN of each query, one neighbour after the other."""
    found = np.zeros((len(queries), NUM_CLASSES))
    for row, query in enumerate(queries.embeddings.double()):
        distances = [float((query - one).norm()) for one in stored.embeddings.double()]
        for near in np.argsort(distances)[:k]:
            label = int(stored.labels[near])
            found[row, label] += np.exp(-distances[near] / scale)
    return cast("NDArray[Any]", found / found.sum(axis=1, keepdims=True))


def right(stored: Embedded, queries: Embedded, weight: float) -> int:
    """Return how many queries the mixture gets right."""
    local = votes(stored, queries, KNN.num_neighbors, KNN.kernel_scale)
    mixed = weight * local + (1 - weight) * queries.probabilities.numpy()
    return int((mixed.argmax(axis=1) == queries.labels.numpy()).sum())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_what_an_exhaustive_search_serves(seed: int) -> None:
    client = new_client(30, 40, seed)
    # Of the first 20 images, 5 are held out and 15 looked up.
    held, rest = client.known.at(slice(0, 5)), client.known.at(slice(5, 20))
    scores = {weight: right(rest, held, weight) for weight in KNN.knn_weights}
    chosen = max(scores, key=lambda weight: (scores[weight], -weight))
    predictor = SERVICE.predictor(client, 20)
    assert predictor.knn_weight == chosen
    expected = right(client.known.at(slice(0, 20)), client.test, chosen)
    assert count_correct(predictor, client) == expected


def test_without_images_it_is_the_global_model() -> None:
    client = new_client(8, 20, 4)
    predictor = SERVICE.predictor(client, 0)
    assert torch.equal(predictor(client.test.embeddings), client.test.probabilities)
    assert count_correct(predictor, client) == client.test.num_correct()
    grid = candidates((0.0, 0.5, 1.0), (4,), (0.7,))
    assert count_correct_with_each(client, 0, KNN, grid).flatten().tolist() == (
        [client.test.num_correct()] * 3
    )


def test_test_images_are_not_looked_at_to_choose() -> None:
    known = new_client(30, 0, 5).known
    blind = NewClient(known, cast(Embedded, None))
    assert SERVICE.predictor(blind, 30).knn_weight == pytest.approx(
        SERVICE.predictor(new_client(30, 9, 5), 30).knn_weight
    )


def test_both_ends_of_the_curve() -> None:
    client = new_client(25, 60, 6)
    grid = candidates((0.0, 0.3, 1.0), (4,), (0.7,))
    curve = count_correct_with_each(client, 25, KNN, grid)[:, 0, 0].tolist()
    assert curve[0] == client.test.num_correct()
    assert curve == [right(client.known, client.test, one) for one in (0.0, 0.3, 1.0)]
    assert curve[0] != curve[2]


def test_more_neighbours_than_images_are_all_of_them() -> None:
    client = new_client(3, 50, 7)
    grid = candidates((1.0,), (3, 4, 100), (0.7,))
    counts = count_correct_with_each(client, 3, KNN, grid).flatten().tolist()
    assert counts == [right(client.known, client.test, 1.0)] * 3


@pytest.mark.parametrize(
    ("num_known", "capacity", "expected"),
    [(10, 0.0, 0), (10, 0.34, 3), (10, 0.35, 4), (7, 1.0, 7), (0, 0.5, 0), (3, 9.0, 3)],
)
def test_a_capacity_is_a_number_of_images(
    num_known: int, capacity: float, expected: int
) -> None:
    assert size_at(num_known, capacity) == expected


def test_some_image_is_left_to_be_looked_up() -> None:
    client = new_client(1, 5, 8)
    predictor = Service(head, KNN, 0.9).predictor(client, 1)
    assert predictor.neighbors.num_stored == 1
    assert predictor.knn_weight == 0
