"""Means of updates, and the projection on the simplex."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.strategies.agnostic import project_to_simplex
from knnper.strategies.core.averaging import RunningMean, average_weights, denominator
from knnper.strategies.core.records import ModelUpdate

FLOATS = st.floats(-1e6, 1e6, width=32)


def test_weights_each_client_by_its_examples() -> None:
    updates = [
        ("a", ModelUpdate(torch.tensor([4.0, 0.0]), num_examples=3, train_loss=0.0)),
        ("b", ModelUpdate(torch.tensor([0.0, 8.0]), num_examples=1, train_loss=0.0)),
    ]
    # (3·4 + 1·0) / 4 = 3 and (3·0 + 1·8) / 4 = 2.
    state = average_weights(iter(updates))
    assert torch.equal(state.weights, torch.tensor([3.0, 2.0]))


@settings(max_examples=30, deadline=None)
@given(values=st.lists(FLOATS, min_size=1), weight=st.integers(1, 10**6))
def test_mean_of_one_tensor_is_that_tensor(values: list[float], weight: int) -> None:
    tensor = torch.tensor(values)
    mean = RunningMean()
    mean.add(tensor, weight)
    assert torch.equal(mean.result(), tensor)


@settings(max_examples=30, deadline=None)
@given(pairs=st.lists(st.tuples(FLOATS, st.integers(1, 1000)), min_size=1, max_size=20))
def test_mean_agrees_with_exact_sum(pairs: list[tuple[float, int]]) -> None:
    mean = RunningMean()
    for value, weight in pairs:
        mean.add(torch.tensor([value]), weight)
    total = sum(weight for _, weight in pairs)
    expected = sum(value * weight for value, weight in pairs) / total
    assert float(mean.result_float64()) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("weight", [0, -1, float("nan")])
def test_refuses_a_weight_that_is_not_positive(weight: float) -> None:
    with pytest.raises(ValueError, match=f"expected a positive weight, found {weight}"):
        RunningMean().add(torch.tensor([1.0]), weight)


def test_refuses_another_shape() -> None:
    mean = RunningMean()
    mean.add(torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"expected shape \(3,\), found \(1,\)"):
        mean.add(torch.ones(1), 1)


def test_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="the mean of no tensors"):
        RunningMean().result()


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ([0.2, 0.8], [0.2, 0.8]),  # it is there
        ([0.7, 0.7], [0.5, 0.5]),  # both too much by 0.2
        ([1.5, 0.1, 0.1], [1.0, 0.0, 0.0]),  # a corner
        ([0.9, 0.5, -0.4], [0.7, 0.3, 0.0]),  # an edge: both too much by 0.2
        ([-3.0], [1.0]),
        ([1e30, 2e30], [0.0, 1.0]),
    ],
)
def test_by_hand(point: list[float], expected: list[float]) -> None:
    projection = project_to_simplex(torch.tensor(point, dtype=torch.float64))
    assert projection.tolist() == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-5, 5, allow_nan=False), min_size=1, max_size=6),
)
def test_no_point_of_the_simplex_is_nearer(coordinates: list[float]) -> None:
    point = torch.tensor(coordinates, dtype=torch.float64)
    projection = project_to_simplex(point)
    assert bool((projection >= 0).all())
    assert float(projection.sum()) == pytest.approx(1)
    # The projection p of x has (x - p)·(q - p) <= 0 for every q of a convex set, which
    # holds for all of them if it does for the corners.
    for corner in torch.eye(len(point), dtype=torch.float64):
        assert float((point - projection) @ (corner - projection)) <= 1e-9


def test_nothing_by_nothing_is_nothing() -> None:
    quotient = torch.tensor([0.0, 3.0]) / denominator(torch.tensor([0.0, 2.0]))
    assert quotient.tolist() == [0.0, 1.5]
