"""The predictor over a hand-made embedding of one-pixel images."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from torch import Tensor

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


@dataclass
class PixelEmbedding:
    """φ(x) is the pixel; remembers how many images each call had."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, images: Tensor) -> Tensor:
        self.calls.append(len(images))
        return images.flatten(start_dim=1).float()


def head(embeddings: Tensor) -> Tensor:
    return torch.tensor([0.25, 0.75]).repeat(len(embeddings), 1)


def predictor(
    pixels: list[int],
    labels: list[int],
    knn_weight: float,
    embed: Callable[[Tensor], Tensor] | None = None,
) -> KnnPredictor:
    embeddings = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1)
    store = memory_store(embeddings, torch.tensor(labels, dtype=torch.int64), 2)
    neighbors = NeighborClassifier(store, 1, "paper", 1.0)
    return KnnPredictor(embed or PixelEmbedding(), head, neighbors, knn_weight)


def image(*pixels: int) -> Tensor:
    return torch.tensor(pixels, dtype=torch.uint8).reshape(-1, 1, 1, 1)


def test_the_mixture_by_hand() -> None:
    served = predictor([10, 200], [0, 1], knn_weight=0.5)
    torch.testing.assert_close(
        served(image(0, 255)), torch.tensor([[0.625, 0.375], [0.125, 0.875]])
    )


def test_images_are_embedded_once() -> None:
    embed = PixelEmbedding()
    predictor([10, 200], [0, 1], 0.5, embed)(image(1, 2, 3))
    assert embed.calls == [3]


@pytest.mark.parametrize("knn_weight", [0.0, 0.3, 1.0])
def test_an_empty_store_serves_the_global_model(knn_weight: float) -> None:
    served = predictor([], [], knn_weight)
    assert served(image(0, 255)).tolist() == [[0.25, 0.75]] * 2
    assert served.describe() == {"knn_weight": 0.0, "num_stored": 0.0}


KNN = torch.tensor([[1.0, 0.0], [0.3, 0.7]])
GLOBAL = torch.tensor([[0.2, 0.8], [0.6, 0.4]])


def test_mixture_by_hand() -> None:
    torch.testing.assert_close(
        interpolate(KNN, GLOBAL, 0.25), torch.tensor([[0.4, 0.6], [0.525, 0.475]])
    )


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
        (KNN, GLOBAL[:1], 0.5, r"shape \(2, 2\) and global ones of .*\(1, 2\)"),
        (KNN[0], GLOBAL, 0.5, r"of shape \(n, c\), found shape \(2,\)"),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    knn: Tensor, alone: Tensor, knn_weight: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        interpolate(knn, alone, knn_weight)


@pytest.mark.parametrize("knn_weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        torch.tensor([[0.5, 0.5], [3.0, -2.0]]),
        torch.tensor([[0.5, 0.5], [0.5, 0.6]]),
        torch.tensor([[0.5, 0.5], [torch.nan, 0.5]]),
    ],
    ids=["range", "sum", "nan"],
)
def test_logits_are_refused(logits: Tensor, knn_weight: float) -> None:
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
    found = KERNELS[name](SQUARED_DISTANCES, kernel_scale, 8)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
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
    found = neighbor_vote(
        torch.from_numpy(log_weights), torch.from_numpy(labels), NUM_CLASSES
    ).numpy()
    np.testing.assert_allclose(found, vote_by_loop(log_weights, labels), atol=1e-6)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, atol=1e-6)


def test_shares_by_hand() -> None:
    log_weights = torch.log(torch.tensor([[3.0, 1.0, 4.0]], dtype=torch.float64))
    found = neighbor_vote(log_weights, torch.tensor([[2, 0, 2]]), 3)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([[0.125, 0.0, 0.875]]))


def test_equal_neighbours_share_equally_at_any_distance() -> None:
    log_weights = torch.tensor([[-1e300, -1e300], [-math.inf, -math.inf]]).double()
    found = neighbor_vote(log_weights, torch.tensor([[0, 1], [0, 1]]), 2)
    assert found.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_no_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="store is empty, use the global model"):
        neighbor_vote(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64), 2)


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


def test_a_query_that_is_not_finite_is_refused() -> None:
    classifier = NeighborClassifier(line([7.0], [1]), 10, "paper", 1.0)
    with pytest.raises(DataError, match="NaN or infinity in row 0"):
        classifier(torch.tensor([[math.nan]]))
