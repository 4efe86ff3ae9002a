"""The forward pass of ProtoNN, against numbers made by hand and brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.protonn import ProtoNN, shares
from knnper.errors import DataError


def test_a_prediction_by_hand() -> None:
    # W x = (1, 0); squared distances 1 and 4; kernels e^-1/4 and e^-1 with γ = 1/2.
    model = ProtoNN(
        projection=torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        prototypes=torch.tensor([[0.0, 0.0], [1.0, 2.0]]),
        label_scores=torch.tensor([[1.0, 0.5], [0.0, 2.0]]),
        inverse_width=0.5,
    )
    first, second = math.exp(-0.25), math.exp(-1.0)
    scores = first, 0.5 * first + 2 * second
    expected = torch.tensor([scores]) / sum(scores)
    torch.testing.assert_close(model(torch.tensor([[1.0, 0.0]])), expected)


def test_a_negative_score_is_no_share() -> None:
    found = shares(torch.tensor([[3.0, -5.0, 1.0], [-1.0, 0.0, -2.0]]))
    third = 1 / 3
    expected = torch.tensor([[0.75, 0.0, 0.25], [third, third, third]])
    torch.testing.assert_close(found, expected)


def gaussian_vote(queries: Tensor, stored: Tensor, labels: Tensor) -> Tensor:
    """Return each label's share of exp(-|x - x_i|²) over all stored, by loops."""
    votes = torch.zeros(len(queries), 3, dtype=torch.float64)
    for row, query in enumerate(queries.double()):
        squared = [float((query - one).square().sum()) for one in stored.double()]
        for distance, label in zip(squared, labels.tolist(), strict=True):
            votes[row, label] += math.exp(-(distance - min(squared)))
    return (votes / votes.sum(dim=1, keepdim=True)).float()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(0.1, 20.0))
def test_with_every_example_a_prototype_it_is_a_gaussian_vote(
    seed: int, num_stored: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = spread * torch.randn(num_stored, 4, generator=generator)
    queries = spread * torch.randn(5, 4, generator=generator)
    labels = torch.randint(3, (num_stored,), generator=generator)
    one_hot = torch.eye(3)[labels]
    found = ProtoNN(torch.eye(4), stored, one_hot, inverse_width=1.0)(queries)
    torch.testing.assert_close(
        found, gaussian_vote(queries, stored, labels), atol=1e-3, rtol=0
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(0.0, 1e6))
def test_rows_are_distributions_however_far_away(
    seed: int, num_prototypes: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = ProtoNN(
        torch.randn(3, 4, generator=generator),
        torch.randn(num_prototypes, 3, generator=generator),
        torch.randn(num_prototypes, 5, generator=generator),
        inverse_width=2.0,
    )
    probabilities = model(spread * torch.randn(7, 4, generator=generator))
    assert bool((probabilities >= 0).all())
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(7))


def test_no_queries_no_rows() -> None:
    model = ProtoNN(torch.eye(2), torch.zeros(1, 2), torch.ones(1, 3), 1.0)
    assert model(torch.empty(0, 2)).shape == (0, 3)


def test_without_prototypes_it_says_nothing() -> None:
    model = ProtoNN(torch.eye(2), torch.empty(0, 2), torch.empty(0, 3), 1.0)
    assert model.num_stored == 0
    with pytest.raises(ValueError, match="at least one prototype, found none"):
        model(torch.zeros(1, 2))


def test_queries_of_another_size_are_refused() -> None:
    model = ProtoNN(torch.eye(2), torch.zeros(1, 2), torch.ones(1, 3), 1.0)
    with pytest.raises(DataError, match="expected 2 numbers in a row"):
        model(torch.zeros(1, 3))


def test_bytes_are_those_of_the_smaller_form() -> None:
    dense = ProtoNN(torch.ones(3, 4), torch.ones(2, 3), torch.ones(2, 5), 1.0)
    assert dense.num_bytes == 4 * (12 + 6 + 10)
    sparse = torch.zeros(3, 4)
    sparse[0, :2] = 1.0
    mixed = ProtoNN(sparse, torch.ones(2, 3), torch.ones(2, 5), 1.0)
    assert mixed.num_bytes == 8 * 2 + 4 * (6 + 10)
