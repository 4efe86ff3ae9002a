"""Clusters of points, of clients, and of models."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.data.examples import no_examples
from knnper.seeding import RandomKey
from knnper.strategies.core import clusters as module
from knnper.strategies.core.clusters import (
    ClusterModels,
    ClusterUpdate,
    best_position,
    bipartition,
    cluster_problem,
    clusters,
    cosines,
    serve_best,
    train_best,
)
from tests.strategies.tiny import KEY, linear_task, white


@pytest.mark.parametrize("seed", range(5))
def test_groups_far_apart_are_found(seed: int) -> None:
    points = torch.tensor([[0.0, 0], [9, 9], [0, 1], [9, 8], [-9, 5], [8, 9]])
    found = clusters(points, 3, RandomKey(seed)).tolist()
    groups = {tuple(i for i in range(6) if found[i] == k) for k in range(3)}
    assert groups == {(0, 2), (1, 3, 5), (4,)}


@pytest.mark.parametrize("seed", range(4))
def test_every_point_is_with_the_nearest_mean(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(30, 3, generator=generator)
    found = clusters(points, 4, RandomKey(seed))
    means = torch.stack([points[found == k].mean(dim=0) for k in range(4)])
    assert torch.equal(torch.cdist(points, means).argmin(dim=1), found)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 5.0]), min_size=1, max_size=8),
    count=st.integers(1, 8),
    seed=st.integers(0, 5),
)
def test_no_cluster_is_empty(values: list[float], count: int, seed: int) -> None:
    points = torch.tensor(values)[:, None]
    if len(points) < count:
        with pytest.raises(ValueError, match=f"expected at least {count} points"):
            clusters(points, count, RandomKey(seed))
        return
    found = clusters(points, count, RandomKey(seed))
    assert sorted(set(found.tolist())) == list(range(count))
    assert torch.equal(found, clusters(points, count, RandomKey(seed)))


def largest_crossing(similarities: Tensor, first: set[int]) -> float:
    second = set(range(len(similarities))) - first
    return max(float(similarities[i, k]) for i in first for k in second)


def best_of_all(similarities: Tensor) -> float:
    """Return the smallest largest crossing over all bipartitions, by trying them."""
    others = range(1, len(similarities))
    firsts = [
        {0, *chosen}
        for size in range(len(others))
        for chosen in itertools.combinations(others, size)
    ]
    return min(largest_crossing(similarities, first) for first in firsts)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 7).flatmap(
        lambda n: st.lists(
            st.integers(-4, 4), min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2
        )
    )
)
def test_no_bipartition_is_better(entries: list[int]) -> None:
    num_members = int((1 + (1 + 8 * len(entries)) ** 0.5) / 2)
    similarities = torch.ones(num_members, num_members)
    pairs = itertools.combinations(range(num_members), 2)
    for (i, k), entry in zip(pairs, entries, strict=True):
        similarities[i, k] = similarities[k, i] = entry / 4

    found = bipartition(similarities)

    assert 0 in found.first
    assert found.second
    assert sorted(found.first + found.second) == list(range(num_members))
    assert found.cross_similarity == best_of_all(similarities)
    crossing = largest_crossing(similarities, set(found.first))
    assert crossing == found.cross_similarity


def test_a_chain_holds_together() -> None:
    # 0 and 2 are far apart, but each is near 1; 3 is near nobody.
    similarities = torch.tensor(
        [
            [1.0, 0.9, -0.9, -0.5],
            [0.9, 1.0, 0.8, -0.2],
            [-0.9, 0.8, 1.0, -0.4],
            [-0.5, -0.2, -0.4, 1.0],
        ]
    )
    found = bipartition(similarities)
    assert (set(found.first), found.second) == ({0, 1, 2}, (3,))
    assert found.cross_similarity == pytest.approx(-0.2)


def test_one_member_cannot_be_parted() -> None:
    with pytest.raises(ValueError, match="expected at least 2 members to part, found"):
        bipartition(torch.ones(1, 1))


def test_cosines_by_hand() -> None:
    vectors = torch.tensor([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [0.0, 0.0]])
    expected = [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    assert cosines(vectors).tolist() == [*expected, [0.0] * 4]


def test_cosines_are_exact_and_the_same_slice_by_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1))
    scaled = torch.cat([vectors, 3 * vectors])
    whole = cosines(scaled)
    exact = torch.nn.functional.cosine_similarity(
        scaled.double()[:, None], scaled.double()[None], dim=-1
    )
    torch.testing.assert_close(whole, exact, rtol=0, atol=1e-14)
    monkeypatch.setattr(module, "_SLICE", 7)
    torch.testing.assert_close(cosines(scaled), whole, rtol=0, atol=1e-14)


ONE_SIDED = torch.tensor([2.0, -2.0])
"""Predicts label 0 of a white pixel."""


def models(*weights: torch.Tensor, default: int = 0) -> ClusterModels:
    numbers = tuple(10 + position for position in range(len(weights)))
    return ClusterModels(weights, numbers, default)


@pytest.mark.parametrize(
    ("length", "cluster", "problem"),
    [
        (2, 10, None),
        (2, 11, None),
        (2, 12, "cluster: expected one of 10, 11, found 12"),
        (3, 11, "weights: expected shape (2,), found (3,)"),
    ],
)
def test_an_update_is_of_a_model_that_was_sent(
    length: int, cluster: int, problem: str | None
) -> None:
    payload = models(ONE_SIDED, -ONE_SIDED)
    update = ClusterUpdate(torch.zeros(length), 1, 0.5, cluster)
    assert cluster_problem(payload, update) == problem


@pytest.mark.parametrize(("labels", "expected"), [([0], 0), ([1, 1], 1), ([0, 1], 2)])
def test_the_lowest_loss_wins(labels: list[int], expected: int) -> None:
    # -log σ(±4) is 0.018 or 4.018, and log 2 = 0.69 at 0; of both labels the mean is
    # 2.02 or 0.69.
    task = linear_task()
    payload = models(ONE_SIDED, -ONE_SIDED, torch.zeros(2))
    assert best_position(task, payload, (white(labels).train,)) == expected


def test_parts_are_weighed_by_their_examples() -> None:
    task = linear_task()
    payload = models(ONE_SIDED, -ONE_SIDED)
    few, many = white([0]).train, white([1, 1]).train
    assert best_position(task, payload, (few, many)) == 1
    assert best_position(task, payload, (few,)) == 0


def test_ties_go_to_the_first_and_nothing_to_the_default() -> None:
    task = linear_task()
    payload = models(ONE_SIDED, ONE_SIDED.clone(), default=1)
    assert best_position(task, payload, (white([0]).train,)) == 0
    assert best_position(task, payload, (no_examples(task.spec),)) == 1


def test_a_model_without_a_loss_is_not_chosen() -> None:
    task = linear_task()
    broken = torch.tensor([float("nan"), 0.0])
    assert best_position(task, models(broken, ONE_SIDED), (white([1]).train,)) == 1


def test_the_chosen_model_is_trained_and_served() -> None:
    task = linear_task()
    payload, data = models(-ONE_SIDED, torch.zeros(2)), white([0])
    update = train_best(task, payload, (data.train,), data.train, 1.0, KEY)
    # From 0 the gradient of label 0 is ½ - 1.
    assert update.weights.tolist() == [0.5, -0.5]
    assert (update.cluster, update.num_examples) == (11, 1)
    predictor = serve_best(task, payload, (data.train,))
    assert predictor.weights is payload.models[1]
    assert predictor.describe() == {"cluster": 11.0}
