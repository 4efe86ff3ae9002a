"""The vote against hand-computed shares and a plain loop."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from knnper.datastore.prediction import neighbor_vote

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
