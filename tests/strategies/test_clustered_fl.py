"""Clustered FL: rounds by hand, and which updates part a cluster."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnper.seeding import RandomKey
from knnper.strategies.clustered_fl import (
    ClusteredFL,
    ClusteredFLSettings,
    ClustersState,
    bipartition,
    cosines,
)
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.hypcluster import ClusterUpdate
from tests.strategies.tiny import KEY, linear_task, normed_task, run_rounds, white

ALWAYS = ClusteredFLSettings(mean_norm_tolerance=100.0, client_norm_tolerance=0.0)
ZERO_SIDED = torch.tensor([2.0, -2.0])
"""Predicts label 0 of a white pixel; its negative predicts 1."""


def update(
    weights: list[float] | Tensor, num_examples: int = 1, cluster: int = 0
) -> ClusterUpdate:
    return ClusterUpdate(torch.as_tensor(weights), num_examples, 0.5, cluster)


def one_cluster(*members: str) -> ClustersState:
    return ClustersState((torch.zeros(2),), dict.fromkeys(members, 0))


def test_two_rounds_by_hand() -> None:
    task = linear_task(learning_rate=4.0)
    method = ClusteredFL(task, ClusteredFLSettings())
    clients = {"a": white([0]), "b": white([1])}
    first, _ = run_rounds(method, clients, num_rounds=1)
    # Δ_a = (2, -2), Δ_b = (-2, 2): their mean is 0 < 0.4, their norms √8 > 1.6.
    assert first.cluster_of == {"a": 0, "b": 1}
    assert [model.tolist() for model in first.models] == [[2.0, -2.0], [-2.0, 2.0]]
    # Then each is alone with its model, and steps by 4 (1 - σ(4)).
    second, _ = run_rounds(method, clients, num_rounds=2)
    expected = 2 + 4 / (1 + math.exp(4))
    assert float(second.models[0][0]) == pytest.approx(expected)
    assert float(second.models[1][0]) == pytest.approx(-expected)


@pytest.mark.parametrize(
    ("mean", "client", "num_clusters"),
    [
        (0.36, 1.41, 2),
        (0.35, 1.41, 1),  # the mean, (¼, -¼), has a norm of 0.354
        (0.36, 1.42, 1),  # the largest update, (1, -1), has one of 1.414
        (0.0, 0.0, 1),
        (100.0, None, 1),
    ],
)
def test_both_tolerances_must_be_met(
    mean: float, client: float | None, num_clusters: int
) -> None:
    chosen = ClusteredFLSettings(mean, client)
    method = ClusteredFL(linear_task(), chosen)
    # 5/8 (1, -1) + 3/8 (-1, 1) = (¼, -¼): weighed by examples.
    updates = [("a", update([1.0, -1.0], 5)), ("b", update([-1.0, 1.0], 3))]
    state = method.aggregate(one_cluster(), iter(updates))
    assert len(state.models) == num_clusters
    if num_clusters == 1:
        assert state.models[0].tolist() == [0.25, -0.25]
        assert state.cluster_of == {"a": 0, "b": 0}


RIGHT_ANGLE = ([3.0, 0.0], [0.0, 2.0])
ONE_AGAINST_THREE = ([1.0, 0.0], [2.0, 0.1], [1.0, -0.1], [-1.0, 0.0])


@pytest.mark.parametrize(
    ("vectors", "settings", "num_clusters"),
    [
        # At right angles α_cross is 0, and √½ = 0.707.
        *(
            (RIGHT_ANGLE, {"separation_gap": gap}, number)
            for gap, number in ((0.0, 2), (0.7, 2), (0.71, 1), (0.99, 1))
        ),
        (([3.0, 0.0], [2.0, 0.0]), {}, 1),
        *(
            (ONE_AGAINST_THREE, {"min_cluster_size": least}, number)
            for least, number in ((1, 2), (2, 1), (3, 1))
        ),
    ],
)
def test_parts_must_be_far_apart_and_large_enough(
    vectors: Sequence[list[float]], settings: dict[str, Any], num_clusters: int
) -> None:
    method = ClusteredFL(linear_task(), replace(ALWAYS, **settings))
    updates = [(str(number), update(vector)) for number, vector in enumerate(vectors)]
    assert len(method.aggregate(one_cluster(), iter(updates)).models) == num_clusters


@pytest.mark.parametrize("order", ["abcd", "dcba", "cadb"])
def test_the_parts_are_those_that_point_apart(order: str) -> None:
    method = ClusteredFL(linear_task(), ALWAYS)
    replies = {
        "a": update([1.0, 0.0], 1),
        "b": update([-1.0, -1.0], 1),
        "c": update([3.0, 4.0], 3),
        "d": update([-5.0, 1.0], 1),
    }
    state = method.aggregate(one_cluster(), iter([(c, replies[c]) for c in order]))
    assert state.cluster_of == {"a": 0, "b": 1, "c": 0, "d": 1}
    # ¼ (1, 0) + ¾ (3, 4) and ½ (-1, -1) + ½ (-5, 1).
    assert [model.tolist() for model in state.models] == [[2.5, 3.0], [-3.0, 0.0]]


def test_buffers_say_nothing_of_how_far_clients_are_apart() -> None:
    task = normed_task()
    method = ClusteredFL(task, ClusteredFLSettings())
    start = method.init(["a", "b"], RandomKey(1))

    def moved(part: slice, step: float) -> Tensor:
        weights: Tensor = start.models[0].clone()
        weights[part] += step
        return weights

    for part, num_clusters in (
        (slice(task.model.num_parameters, None), 1),
        (slice(0, task.model.num_parameters), 2),
    ):
        updates = [("a", update(moved(part, 5.0))), ("b", update(moved(part, -5.0)))]
        assert len(method.aggregate(start, iter(updates)).models) == num_clusters


def test_clusters_are_trained_apart() -> None:
    chosen = ClusteredFLSettings(client_norm_tolerance=None)
    method = ClusteredFL(linear_task(), chosen)
    before = ClustersState(
        (ZERO_SIDED, -ZERO_SIDED, torch.ones(2)), {"a": 1, "b": 0, "c": 2, "d": 1}
    )
    # What a client says of its cluster counts only where it has none.
    updates = [
        ("a", update([4.0, 0.0], 1, cluster=1)),
        ("b", update([7.0, 7.0], 5, cluster=2)),
        ("d", update([0.0, 4.0], 3, cluster=0)),
        ("e", update([9.0, 9.0], 5, cluster=0)),
        ("f", update([5.0, 5.0], 5, cluster=3)),
    ]
    state = method.aggregate(before, iter(updates))
    assert [model.tolist() for model in state.models] == [
        [8.0, 8.0],
        [1.0, 3.0],
        [1.0, 1.0],
    ]
    assert state.cluster_of == {**before.cluster_of, "e": 0}


def test_client_absent_during_a_split_finds_its_cluster() -> None:
    method = ClusteredFL(linear_task(), ALWAYS)
    before = one_cluster("a", "b", "away")
    updates = [("a", update(ZERO_SIDED)), ("b", update(-ZERO_SIDED))]
    state = method.aggregate(before, iter(updates))
    assert state.cluster_of == {"a": 0, "b": 1}
    payload = method.broadcast(state, "away", KEY)
    assert payload.numbers == (0, 1)
    _, late_update = method.client_update(payload, None, white([1]), 2, KEY)
    assert late_update.cluster == 1
    later = method.aggregate(state, iter([("away", late_update)]))
    assert later.cluster_of == {"a": 0, "b": 1, "away": 1}
    assert torch.equal(later.models[0], state.models[0])
    personal = method.broadcast(later, "away", KEY)
    assert personal.numbers == (1,)
    assert torch.equal(personal.models[0], later.models[1])


@pytest.mark.parametrize(
    ("known_as", "train", "validation", "expected"),
    [
        (UNSEEN_CLIENT, [1, 1], [0], 0),
        (UNSEEN_CLIENT, [0, 0], [1], 1),
        (UNSEEN_CLIENT, [1], [], 1),
        (UNSEEN_CLIENT, [], [], 1),
        ("b", [0], [], 1),  # a member is served its cluster's, whatever fits
    ],
)
def test_unseen_clients_join_by_their_validation_split(
    known_as: str, train: list[int], validation: list[int], expected: int
) -> None:
    method = ClusteredFL(linear_task(), ClusteredFLSettings())
    state = ClustersState((ZERO_SIDED, -ZERO_SIDED), {"a": 0, "b": 1, "c": 1})
    payload = method.broadcast(state, known_as, KEY)
    predictor = method.personalize(payload, None, white(train, validation), KEY)
    assert predictor.describe() == {"cluster": float(expected)}
    served = predictor(white([0]).train.images)
    assert int(served.argmax()) == expected


def parallel(num_clients: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return a model, and what updates of one direction make of it, rounded."""
    with RandomKey(seed).torch():
        start, direction = torch.randn(300), torch.randn(300)
        lengths = torch.rand(num_clients) + 0.1
    return start, [start + length * direction for length in lengths]


@pytest.mark.parametrize("seed", range(3))
def test_parallel_updates_are_one_cluster_whatever_their_rounding(seed: int) -> None:
    task = linear_task(num_pixels=150)
    method = ClusteredFL(task, ALWAYS)
    start, models = parallel(5, seed)
    before = ClustersState((start,), {})
    updates = [(str(number), update(model)) for number, model in enumerate(models)]
    assert len(method.aggregate(before, iter(updates)).models) == 1
    # A hundredth of a right angle away is another direction.
    turned = start + (models[4] - start).roll(1) * 0.02 + (models[4] - start)
    updates[4] = ("4", update(turned))
    state = method.aggregate(before, iter(updates))
    assert state.cluster_of == {"0": 0, "1": 0, "2": 0, "3": 0, "4": 1}


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
    first, second, crossing = bipartition(similarities)
    assert 0 in first
    assert second
    assert sorted((*first, *second)) == list(range(num_members))
    assert crossing == best_of_all(similarities)
    assert crossing == largest_crossing(similarities, set(first))


def test_cosines_by_hand() -> None:
    vectors = torch.tensor([[3.0, 4.0], [6.0, 8.0], [-4.0, 3.0], [0.0, 0.0]])
    expected = [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    assert cosines(vectors).tolist() == [*expected, [0.0] * 4]


def test_cosines_are_exact_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knnper.strategies.clustered_fl._SLICE", 7)
    vectors = torch.randn(5, 100, generator=torch.Generator().manual_seed(1)).double()
    exact = torch.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    torch.testing.assert_close(cosines(vectors.float()), exact, rtol=0, atol=1e-7)
