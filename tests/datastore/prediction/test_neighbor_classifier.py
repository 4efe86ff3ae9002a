"""The local hypothesis from store to probabilities."""

import math

import pytest
import torch

from knnper.datastore.prediction import KernelName, NeighborClassifier
from knnper.datastore.store import Store, memory_store
from knnper.errors import DataError


def line(positions: list[float], labels: list[int]) -> Store:
    return memory_store(torch.tensor(positions)[:, None], torch.tensor(labels), 3)


@pytest.mark.parametrize(
    ("kernel", "kernel_scale", "far_weight"),
    [
        ("paper", 1.0, math.exp(-3)),
        ("paper", 2.0, math.exp(-1.5)),
        ("squared", 1.0, math.exp(-9)),
        ("squared", 4.5, math.exp(-2)),
    ],
)
def test_probabilities_by_hand(
    kernel: KernelName, kernel_scale: float, far_weight: float
) -> None:
    store = line([0.0, 3.0, 50.0], [2, 1, 0])
    found = NeighborClassifier(store, 2, kernel, kernel_scale)(torch.zeros(1, 1))
    total = 1 + far_weight

    torch.testing.assert_close(found, torch.tensor([[0, far_weight, 1]]) / total)


def test_duplicates_count_once_each() -> None:
    store = line([1.0, 1.0, 1.0, 2.0], [0, 1, 1, 2])
    found = NeighborClassifier(store, 3, "paper", 1.0)(torch.tensor([[1.0]]))

    torch.testing.assert_close(found, torch.tensor([[1 / 3, 2 / 3, 0.0]]))


@pytest.mark.parametrize("distance", [1e6, 1e18, 1e30])
@pytest.mark.parametrize("kernel", ["paper", "squared"])
def test_far_queries_have_finite_probabilities(
    kernel: KernelName, distance: float
) -> None:
    store = line([0.0, distance / 2], [1, 2])
    classifier = NeighborClassifier(store, 2, kernel, 1e-3)
    found = classifier(torch.tensor([[distance], [-distance]]))

    assert found.tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]


def test_one_example_decides_alone() -> None:
    found = NeighborClassifier(line([7.0], [1]), 10, "paper", 1.0)(torch.zeros(2, 1))

    assert found.tolist() == [[0.0, 1.0, 0.0]] * 2


def test_a_query_that_is_not_finite_is_refused() -> None:
    classifier = NeighborClassifier(line([7.0], [1]), 10, "paper", 1.0)

    with pytest.raises(DataError, match="NaN or infinity in row 0"):
        classifier(torch.tensor([[math.nan]]))
