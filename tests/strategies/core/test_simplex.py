import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.strategies.core.averaging import project_to_simplex

COORDINATES = st.floats(-5, 5, allow_nan=False)


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
    found = project_to_simplex(torch.tensor(point, dtype=torch.float64))
    assert found.tolist() == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(COORDINATES, min_size=1, max_size=6),
    st.lists(st.floats(0.01, 1), min_size=6, max_size=6),
)
def test_no_point_of_the_simplex_is_nearer(
    coordinates: list[float], other: list[float]
) -> None:
    point = torch.tensor(coordinates, dtype=torch.float64)
    found = project_to_simplex(point)
    assert bool((found >= 0).all())
    assert float(found.sum()) == pytest.approx(1)
    # The projection p of x has (x - p)·(q - p) <= 0 for every q of a convex set.
    inside = torch.tensor(other[: len(point)], dtype=torch.float64)
    inside /= inside.sum()
    assert float((point - found) @ (inside - found)) <= 1e-9
    for corner in torch.eye(len(point), dtype=torch.float64):
        assert float((point - found) @ (corner - found)) <= 1e-9
