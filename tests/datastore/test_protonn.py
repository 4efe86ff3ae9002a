import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.datastore.protonn import (
    LOSSES,
    LossName,
    ProtoNN,
    ProtoNNSettings,
    cross_entropy_loss,
    fit_protonn,
    initial_projection,
    initial_prototypes,
    inverse_width,
    log_similarity,
    prototypes_per_label,
    shares,
    squared_loss,
)
from knnper.errors import DataError
from knnper.seeding import RandomKey


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
    probabilities = shares(torch.tensor([[3.0, -5.0, 1.0], [-1.0, 0.0, -2.0]]))
    third = 1 / 3
    expected = torch.tensor([[0.75, 0.0, 0.25], [third, third, third]])
    torch.testing.assert_close(probabilities, expected)


def gaussian_vote(queries: Tensor, stored: Tensor, labels: Tensor) -> Tensor:
    """Return each label's share of exp(-|x - x_i|²) over all stored, by loops."""
    votes = torch.zeros(len(queries), 3, dtype=torch.float64)
    for row, query in enumerate(queries.double()):
        squared = [float((query - vector).square().sum()) for vector in stored.double()]
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
    vote = ProtoNN(torch.eye(4), stored, one_hot, inverse_width=1.0)(queries)
    torch.testing.assert_close(
        vote, gaussian_vote(queries, stored, labels), atol=1e-3, rtol=0
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


def test_without_prototypes_prediction_is_refused() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    model = fit_protonn(torch.empty(0, 2), nothing, 3, ProtoNNSettings(), RandomKey(5))
    assert (model.num_stored, model.label_scores.shape) == (0, (0, 3))
    with pytest.raises(ValueError, match="at least one prototype, found none"):
        model(torch.zeros(1, 2))
    model = ProtoNN(torch.eye(2), torch.zeros(1, 2), torch.ones(1, 3), 1.0)
    assert model(torch.empty(0, 2)).shape == (0, 3)
    with pytest.raises(DataError, match="expected 2 numbers in a row"):
        model(torch.zeros(1, 3))


def test_bytes_are_those_of_the_smaller_form() -> None:
    dense = ProtoNN(torch.ones(3, 4), torch.ones(2, 3), torch.ones(2, 5), 1.0)
    assert dense.num_bytes == 4 * (12 + 6 + 10)
    sparse = torch.zeros(3, 4)
    sparse[0, :2] = 1.0
    mixed = ProtoNN(sparse, torch.ones(2, 3), torch.ones(2, 5), 1.0)
    assert mixed.num_bytes == 8 * 2 + 4 * (6 + 10)


KEY = RandomKey(5)


def training_loss(
    model: ProtoNN, embeddings: Tensor, labels: Tensor, loss: LossName
) -> float:
    """Return what training lowers."""
    projected = embeddings @ model.projection.T
    kernel = log_similarity(projected, model.prototypes, model.inverse_width).exp()
    return float(LOSSES[loss](kernel @ model.label_scores, labels))


def clusters(num_each: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return two labels of two clusters each, as in XOR, in four dimensions."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.tensor([[1, 1, 0, 0], [-1, -1, 0, 0], [1, -1, 0, 0]])
    centres = torch.cat([centres, -centres[2:]]).float()
    noise = torch.randn(4 * num_each, 4, generator=generator)
    labels = torch.tensor([0, 0, 1, 1]).repeat_interleave(num_each)
    return centres.repeat_interleave(num_each, dim=0) + noise, labels


def test_losses_by_hand() -> None:
    scores, labels = torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 0])
    assert float(squared_loss(scores, labels)) == pytest.approx((4 + 1 + 1 + 4) / 4)
    # Shares of the label: 3/4, and 0, which counts as a millionth.
    expected = -torch.tensor([0.75, 1e-6]).log().mean()
    torch.testing.assert_close(cross_entropy_loss(scores, labels), expected)


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("projection_dim", [None, 2])
def test_training_lowers_the_loss(loss: LossName, projection_dim: int | None) -> None:
    examples, labels = clusters()
    settings = ProtoNNSettings(capacity=0.1, projection_dim=projection_dim, loss=loss)
    losses = [
        training_loss(
            fit_protonn(examples, labels, 2, replace(settings, num_steps=steps), KEY),
            examples,
            labels,
            loss,
        )
        for steps in (0, 10, 40)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_fewer_examples_than_dimensions_move_the_projection_in_their_span(
    loss: LossName,
) -> None:
    generator = torch.Generator().manual_seed(3)
    examples, labels = torch.randn(12, 20, generator=generator), torch.arange(12) % 3
    settings = ProtoNNSettings(capacity=0.25, projection_dim=5, loss=loss)
    start, trained = (
        fit_protonn(examples, labels, 3, replace(settings, num_steps=steps), KEY)
        for steps in (0, 30)
    )
    assert training_loss(trained, examples, labels, loss) < training_loss(
        start, examples, labels, loss
    )
    change = trained.projection - start.projection
    assert float(change.norm()) > 0.01
    outside = torch.linalg.svd(examples).Vh[12:]
    torch.testing.assert_close(change @ outside.T, torch.zeros(5, 8), atol=1e-5, rtol=0)


def test_it_learns_what_no_linear_model_can() -> None:
    model = fit_protonn(*clusters(), 2, ProtoNNSettings(capacity=0.1), KEY)
    assert model.num_stored == 8
    examples, labels = clusters(seed=1)
    assert float((model(examples).argmax(dim=1) == labels).double().mean()) > 0.95


def test_the_same_key_gives_the_same_bits() -> None:
    settings = ProtoNNSettings(projection_dim=3)
    examples, labels = clusters()
    model, again, other = (
        fit_protonn(examples, labels, 2, settings, key)
        for key in (KEY, KEY, RandomKey(6))
    )
    assert torch.equal(model.projection, again.projection)
    assert torch.equal(model(examples), again(examples))
    assert not torch.equal(model.projection, other.projection)


def test_all_prototypes_untrained_are_the_examples() -> None:
    examples, labels = clusters(5)
    settings = ProtoNNSettings(capacity=1.0, num_steps=0)
    model = fit_protonn(examples, labels, 2, settings, KEY)
    assert torch.equal(model.projection, torch.eye(4))
    rows = sorted(examples.tolist())  # a product with the identity is exact
    assert sorted(model.prototypes.tolist()) == rows
    for row, label in zip(examples, labels.tolist(), strict=True):
        place = int((model.prototypes == row).all(dim=1).nonzero()[0])
        assert model.label_scores[place].tolist() == torch.eye(2)[label].tolist()


@pytest.mark.parametrize("projection_dim", [None, 4, 9])
def test_as_many_dimensions_or_more_start_from_the_identity(
    projection_dim: int | None,
) -> None:
    assert torch.equal(initial_projection(4, projection_dim, KEY), torch.eye(4))


def test_a_random_projection_about_keeps_lengths() -> None:
    projection = initial_projection(400, 200, KEY)
    assert projection.shape == (200, 400)
    lengths = (torch.eye(400) @ projection.T).norm(dim=1)
    assert float(lengths.mean()) == pytest.approx(1.0, abs=0.05)


def test_prototypes_are_shared_out_by_hand() -> None:
    labels = torch.tensor([0] * 10 + [1] * 4 + [3])
    # Running sums 10, 14, 14, 15 by 0.3: 3, 4.2, 4.2, 4.5 -> 3, 4, 4, 5.
    assert prototypes_per_label(labels, 4, 0.3).tolist() == [3, 1, 0, 1]
    assert prototypes_per_label(labels, 4, 0.01).tolist() == [1, 1, 0, 1]
    assert prototypes_per_label(labels, 4, 1.0).tolist() == [10, 4, 0, 1]


def test_kmeans_finds_clusters_that_are_far_apart() -> None:
    points = torch.tensor([[0.0], [1.0], [100.0], [102.0], [7.0]])
    labels = torch.tensor([0, 0, 0, 0, 1])
    prototypes, one_hot = initial_prototypes(
        points, labels, torch.tensor([2, 1]), RandomKey(1)
    )
    assert sorted(prototypes.flatten().tolist()) == [0.5, 7.0, 101.0]
    assert one_hot.tolist() == [[1, 0], [1, 0], [0, 1]]


def test_the_width_is_that_of_the_median_distance() -> None:
    projected, prototypes = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([[0.0]])
    # Distances 1 and 5; torch takes the lower of two middle ones.
    assert inverse_width(projected, prototypes, 2.5) == 2.5
    assert inverse_width(prototypes, prototypes, 2.5) == 1.0


def test_sparse_parts_have_as_many_numbers_as_allowed() -> None:
    examples, labels = clusters()
    settings = ProtoNNSettings(capacity=0.1, projection_dim=2, fraction_nonzero=0.25)
    model = fit_protonn(examples, labels, 2, settings, KEY)
    for part in (model.projection, model.prototypes, model.label_scores):
        assert int(part.count_nonzero()) <= part.numel() / 4
    dense = fit_protonn(examples, labels, 2, replace(settings, fraction_nonzero=1), KEY)
    assert model.num_bytes == dense.num_bytes / 2


@pytest.mark.parametrize("num_steps", [0, 30])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("labels", [[1], [1, 1], [0, 2], [2, 2, 2]])
def test_few_examples(labels: list[int], loss: LossName, num_steps: int) -> None:
    examples = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(1))
    settings = ProtoNNSettings(capacity=0.1, loss=loss, num_steps=num_steps)
    model = fit_protonn(examples, torch.tensor(labels), 3, settings, KEY)
    assert model.num_stored == len(set(labels))
    assert model(examples).argmax(dim=1).tolist() == labels


def test_labels_of_other_classes_are_refused() -> None:
    with pytest.raises(DataError, match=r"values in \[0, 2\), found 2 in row 0"):
        fit_protonn(torch.zeros(1, 4), torch.tensor([2]), 2, ProtoNNSettings(), KEY)
