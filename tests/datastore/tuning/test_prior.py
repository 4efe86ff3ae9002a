"""What λ is expected of a client of some size."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore.tuning import NO_PRIOR, PriorPoint, prior_of_size, weights_by_size

POINTS = (PriorPoint(1000, 0.9), PriorPoint(10, 0.1))


@pytest.mark.parametrize(
    ("num_examples", "expected"),
    [(10, 0.1), (100, 0.5), (1000, 0.9), (1, 0.1), (0, 0.1), (10**6, 0.9)],
)
def test_between_points_the_weight_is_linear_in_the_logarithm(
    num_examples: int, expected: float
) -> None:
    prior = prior_of_size(POINTS, 3.0, num_examples)
    assert prior.knn_weight == pytest.approx(expected)
    assert prior.strength == 3.0


def test_no_points_expect_nothing() -> None:
    assert prior_of_size((), 3.0, 50) == NO_PRIOR


def test_clients_of_similar_size_share_a_point() -> None:
    points = weights_by_size([4, 9, 100, 400], [0.0, 0.2, 0.5, 0.7], num_points=2)
    assert [point.num_examples for point in points] == [6, 200]
    assert [point.knn_weight for point in points] == pytest.approx([0.1, 0.6])


def test_the_weight_does_not_fall() -> None:
    # 0.6 before 0.3 is pooled to 0.45, which 0.36 still undercuts: the mean of three.
    points = weights_by_size([1, 2, 3, 4, 5], [0.1, 0.6, 0.3, 0.36, 0.9])
    assert [point.knn_weight for point in points] == pytest.approx(
        [0.1, 0.42, 0.42, 0.42, 0.9]
    )


def test_clients_without_examples_are_left_out() -> None:
    assert weights_by_size([0, 5], [1.0, 0.3]) == (PriorPoint(5, 0.3),)


@settings(max_examples=50, deadline=None)
@given(
    clients=st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=40
    ),
    num_points=st.integers(1, 8),
)
def test_points_rise_and_keep_the_mean(
    clients: list[tuple[int, float]], num_points: int
) -> None:
    sizes, weights = [list(column) for column in zip(*clients, strict=True)]
    points = weights_by_size([int(size) for size in sizes], weights, num_points)

    assert 1 <= len(points) <= num_points
    found_sizes = [point.num_examples for point in points]
    assert found_sizes == sorted(set(found_sizes))
    found = [point.knn_weight for point in points]
    assert all(
        before <= after or math.isclose(before, after)
        for before, after in itertools.pairwise(found)
    )
    assert min(weights) - 1e-9 <= found[0]
    assert found[-1] <= max(weights) + 1e-9


@pytest.mark.parametrize(
    ("sizes", "weights", "num_points", "message"),
    [
        ([1, 2], [0.5], 5, "found 1 for 2"),
        ([0], [0.5], 5, "at least one client with examples"),
        ([1], [0.5], 0, "at least one point, found 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    sizes: list[int], weights: list[float], num_points: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        weights_by_size(sizes, weights, num_points)
