import math

import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData, no_examples
from knnper.errors import Problem
from knnper.experiment import TrainingSettings
from knnper.loading import parse_settings
from knnper.seeding import RandomKey
from knnper.strategies.clustered_fl import (
    ClusteredFL,
    ClusteredFLSettings,
    ClustersState,
)
from knnper.strategies.core.clusters import ClusterUpdate
from knnper.strategies.core.method import UNSEEN_CLIENT, NoSettings
from knnper.strategies.fedavg import FedAvg
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds

ALWAYS = ClusteredFLSettings(mean_norm_tolerance=100.0, client_norm_tolerance=0.0)
ZERO_SIDED = torch.tensor([2.0, -2.0])
"""Predicts label 0 of a white pixel; its negative predicts 1."""


def update(
    weights: list[float] | Tensor, num_examples: int = 1, cluster: int = 0
) -> ClusterUpdate:
    return ClusterUpdate(torch.as_tensor(weights), num_examples, 0.5, cluster)


def one_cluster(*members: str) -> ClustersState:
    return ClustersState((torch.zeros(2),), dict.fromkeys(members, 0))


def test_two_rounds_by_hand(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(learning_rate=4.0))
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
    linear_task: MakeTask, mean: float, client: float | None, num_clusters: int
) -> None:
    settings = ClusteredFLSettings(mean, client)
    method = ClusteredFL(linear_task(TrainingSettings()), settings)
    # 5/8 (1, -1) + 3/8 (-1, 1) = (¼, -¼): weighed by examples.
    updates = [("a", update([1.0, -1.0], 5)), ("b", update([-1.0, 1.0], 3))]
    state = method.aggregate(one_cluster(), iter(updates))
    assert len(state.models) == num_clusters
    if num_clusters == 1:
        assert state.models[0].tolist() == [0.25, -0.25]
        assert state.cluster_of == {"a": 0, "b": 0}


@pytest.mark.parametrize(
    "settings",
    [
        ClusteredFLSettings(mean_norm_tolerance=1e6, client_norm_tolerance=None),
        ClusteredFLSettings(mean_norm_tolerance=0.0, client_norm_tolerance=0.0),
    ],
)
def test_it_is_fedavg_where_nothing_is_parted(
    normed_task: MakeTask,
    noisy: MakeClient,
    run_rounds: RunRounds,
    key: RandomKey,
    settings: ClusteredFLSettings,
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, learning_rate=0.1, momentum=0.5))
    plain, method = FedAvg(task, NoSettings()), ClusteredFL(task, settings)
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    expected, _ = run_rounds(plain, clients, num_rounds=3)
    found, _ = run_rounds(method, clients, num_rounds=3)
    (model,) = found.models
    assert torch.equal(model, expected.weights)

    images = clients["a"].validation.images
    for known_as in ("a", UNSEEN_CLIENT):
        payload = method.broadcast(found, known_as, key)
        served = method.personalize(payload, None, clients["a"], key)(images)
        assert torch.equal(served, task.probabilities(expected.weights, images))


@pytest.mark.parametrize(
    ("gap", "num_clusters"), [(0.0, 2), (0.7, 2), (0.71, 1), (0.99, 1)]
)
def test_the_parts_must_be_far_enough_apart(
    linear_task: MakeTask, gap: float, num_clusters: int
) -> None:
    settings = ClusteredFLSettings(100.0, 0.0, separation_gap=gap)
    method = ClusteredFL(linear_task(TrainingSettings()), settings)
    # At right angles α_cross is 0, and √½ = 0.707.
    updates = [("a", update([3.0, 0.0])), ("b", update([0.0, 2.0]))]
    assert len(method.aggregate(one_cluster(), iter(updates)).models) == num_clusters


def test_one_direction_is_one_cluster(linear_task: MakeTask) -> None:
    method = ClusteredFL(linear_task(TrainingSettings()), ALWAYS)
    updates = [("a", update([3.0, 0.0])), ("b", update([2.0, 0.0]))]
    assert len(method.aggregate(one_cluster(), iter(updates)).models) == 1


@pytest.mark.parametrize(("least", "num_clusters"), [(1, 2), (2, 1), (3, 1)])
def test_a_part_must_be_large_enough(
    linear_task: MakeTask, least: int, num_clusters: int
) -> None:
    settings = ClusteredFLSettings(100.0, 0.0, min_cluster_size=least)
    method = ClusteredFL(linear_task(TrainingSettings()), settings)
    vectors = {"a": [1.0, 0.0], "b": [2.0, 0.1], "c": [1.0, -0.1], "d": [-1.0, 0.0]}
    updates = [(client, update(vector)) for client, vector in vectors.items()]
    state = method.aggregate(one_cluster(), iter(updates))
    assert len(state.models) == num_clusters


@pytest.mark.parametrize("order", ["abcd", "dcba", "cadb"])
def test_the_parts_are_those_that_point_apart(
    linear_task: MakeTask, order: str
) -> None:
    method = ClusteredFL(linear_task(TrainingSettings()), ALWAYS)
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


def test_buffers_say_nothing_of_how_far_clients_are_apart(
    normed_task: MakeTask,
) -> None:
    task = normed_task(TrainingSettings())
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


def test_clusters_are_trained_apart(linear_task: MakeTask) -> None:
    settings = ClusteredFLSettings(client_norm_tolerance=None)
    method = ClusteredFL(linear_task(TrainingSettings()), settings)
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


def test_who_was_away_when_a_cluster_was_parted_finds_its_part(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    method = ClusteredFL(linear_task(TrainingSettings()), ALWAYS)
    before = one_cluster("a", "b", "away")
    updates = [("a", update(ZERO_SIDED)), ("b", update(-ZERO_SIDED))]
    state = method.aggregate(before, iter(updates))
    assert state.cluster_of == {"a": 0, "b": 1}

    payload = method.broadcast(state, "away", key)
    assert payload.numbers == (0, 1)
    _, found = method.client_update(payload, None, white([1]), 2, key)
    assert found.cluster == 1
    later = method.aggregate(state, iter([("away", found)]))
    assert later.cluster_of == {"a": 0, "b": 1, "away": 1}
    assert torch.equal(later.models[0], state.models[0])
    own = method.broadcast(later, "away", key)
    assert own.numbers == (1,)
    assert torch.equal(own.models[0], later.models[1])


@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [([1, 1], [0], 0), ([0, 0], [1], 1), ([1], [], 1), ([], [], 1)],
)
def test_unseen_clients_join_by_their_validation_split(
    linear_task: MakeTask,
    white: MakeClient,
    key: RandomKey,
    train: list[int],
    validation: list[int],
    expected: int,
) -> None:
    method = ClusteredFL(linear_task(TrainingSettings()), ClusteredFLSettings())
    state = ClustersState((ZERO_SIDED, -ZERO_SIDED), {"a": 0, "b": 1, "c": 1})
    payload = method.broadcast(state, UNSEEN_CLIENT, key)
    data = ClientData(white(train).train, white(validation).train)
    predictor = method.personalize(payload, None, data, key)
    assert predictor.describe() == {"cluster": float(expected)}
    served = predictor(white([0]).train.images)
    assert int(served.argmax()) == expected


def test_a_member_is_served_its_clusters_model_whatever_fits(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings())
    method = ClusteredFL(task, ClusteredFLSettings())
    state = ClustersState((ZERO_SIDED, -ZERO_SIDED), {"a": 1})
    data = ClientData(white([0]).train, no_examples(task.spec))
    payload = method.broadcast(state, "a", key)
    predictor = method.personalize(payload, None, data, key)
    assert predictor.describe() == {"cluster": 1.0}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mean_norm_tolerance", -1, "expected a number of at least 0"),
        ("client_norm_tolerance", float("inf"), "expected a finite number"),
        ("separation_gap", 1.0, "expected a number of at least 0 and less than 1"),
        ("min_cluster_size", 0, "expected a number of at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(
    name: str, value: float, message: str
) -> None:
    problems: list[Problem] = []
    parse_settings(ClusteredFLSettings, {name: value}, "method", problems)
    (problem,) = problems
    assert problem.place == f"method.{name}"
    assert message in problem.message
