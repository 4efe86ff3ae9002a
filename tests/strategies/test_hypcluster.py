import math
from collections import Counter

import pytest
import torch

from knnper.data.examples import ClientData
from knnper.errors import Problem
from knnper.experiment import TrainingSettings
from knnper.loading import parse_settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean
from knnper.strategies.core.clusters import ClusterUpdate
from knnper.strategies.core.method import UNSEEN_CLIENT, Method, NoSettings
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.hypcluster import HypCluster, HypClusterSettings, HypClusterState
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds

ZERO_SIDED = torch.tensor([2.0, -2.0])
"""Predicts label 0 of a white pixel; its negative predicts 1."""


def hypcluster_of(task: Task, num_clusters: int = 2) -> Method:
    return HypCluster(task, HypClusterSettings(num_clusters))


def clustered(*centers: torch.Tensor, largest: int = 0) -> HypClusterState:
    return HypClusterState(centers, largest, {})


def update(weights: list[float], num_examples: int, cluster: int) -> ClusterUpdate:
    return ClusterUpdate(torch.tensor(weights), num_examples, 0.5, cluster)


def test_two_rounds_by_hand(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds, key: RandomKey
) -> None:
    method = hypcluster_of(linear_task(TrainingSettings(learning_rate=4.0)))
    clients = {"a": white([0]), "b": white([1, 1])}
    first, _ = run_rounds(method, clients, num_rounds=1)
    # From 0, y_a = 0 - 4 (½ - 1, ½) = (2, -2) and y_b = (-2, 2): two groups of one.
    deal = method.init(["a", "b"], key.child("init")).deal
    assert first.centers[deal["a"]].tolist() == [2.0, -2.0]
    assert first.centers[deal["b"]].tolist() == [-2.0, 2.0]
    assert first.largest == deal["b"]
    # Each chooses the model that predicts its label, and steps by 4 (1 - σ(4)).
    second, _ = run_rounds(method, clients, num_rounds=2)
    expected = 2 + 4 / (1 + math.exp(4))
    assert float(second.centers[deal["a"]][0]) == pytest.approx(expected)
    assert float(second.centers[deal["b"]][0]) == pytest.approx(-expected)
    assert second.deal == {}


def test_one_cluster_is_fedavg(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds, key: RandomKey
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, learning_rate=0.1, momentum=0.5))
    plain, method = FedAvg(task, NoSettings()), hypcluster_of(task, 1)
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    expected, _ = run_rounds(plain, clients, num_rounds=3)
    found, _ = run_rounds(method, clients, num_rounds=3)
    (center,) = found.centers
    assert torch.equal(center, expected.weights)

    images = clients["a"].validation.images
    payload = plain.broadcast(expected, "a", key)
    of_fedavg = plain.personalize(payload, None, clients["a"], key)
    payload = method.broadcast(found, "a", key)
    served = method.personalize(payload, None, clients["a"], key)
    assert torch.equal(served(images), of_fedavg(images))


def test_clients_are_dealt_evenly_and_at_random(
    linear_task: MakeTask, key: RandomKey
) -> None:
    method = hypcluster_of(linear_task(TrainingSettings()), num_clusters=3)
    names = [f"client {number:02d}" for number in range(20)]
    deal = method.init(names, key).deal
    assert sorted(Counter(deal.values()).values()) == [6, 7, 7]
    assert method.init(names, key).deal == deal
    assert method.init(names, key.child("other")).deal != deal


def test_groups_are_means_and_an_empty_one_that_of_all(linear_task: MakeTask) -> None:
    method = hypcluster_of(linear_task(TrainingSettings()), num_clusters=3)
    start = HypClusterState((torch.zeros(2),), 0, {"a": 2, "b": 0, "c": 0, "d": 1})
    updates = [
        ("a", update([8.0, 0.0], 4, 0)),
        ("b", update([4.0, 0.0], 1, 0)),
        ("c", update([0.0, 4.0], 3, 0)),
    ]
    state = method.aggregate(start, iter(updates))
    # ¼ (4, 0) + ¾ (0, 4); nobody of group 1 replied: ½ (8, 0) + ⅛ (4, 0) + ⅜ (0, 4).
    assert [center.tolist() for center in state.centers] == [
        [1.0, 3.0],
        [4.5, 1.5],
        [8.0, 0.0],
    ]
    assert state.deal == {}
    assert state.largest == 0


def test_only_the_chosen_cluster_moves(linear_task: MakeTask) -> None:
    method = hypcluster_of(linear_task(TrainingSettings()))
    before = clustered(ZERO_SIDED, -ZERO_SIDED)
    updates = [("a", update([4.0, 0.0], 1, 1)), ("b", update([0.0, 4.0], 3, 1))]
    state = method.aggregate(before, iter(updates))
    assert state.centers[0] is before.centers[0]
    assert state.centers[1].tolist() == [1.0, 3.0]
    assert state.largest == 1


@pytest.mark.parametrize("claimed", [2, -1])
def test_a_cluster_that_there_is_not_is_left_out(
    linear_task: MakeTask, claimed: int
) -> None:
    method = hypcluster_of(linear_task(TrainingSettings()))
    before = clustered(ZERO_SIDED, -ZERO_SIDED, largest=1)
    state = method.aggregate(before, iter([("a", update([9.0, 9.0], 1, claimed))]))
    assert all(map(torch.equal, state.centers, before.centers))
    assert state.largest == 1


def test_nothing_is_summed_for_a_cluster_that_there_is_not(
    linear_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[list[float]] = []

    class Watched(RunningMean):
        def add(self, tensor: torch.Tensor, weight: float) -> None:
            added.append(tensor.tolist())
            super().add(tensor, weight)

    monkeypatch.setattr("knnper.strategies.hypcluster.RunningMean", Watched)
    method = hypcluster_of(linear_task(TrainingSettings()))
    claimed = (7, 8, -1, 0, 2)
    updates = [(f"client {k}", update([float(k), 0.0], 1, k)) for k in claimed]
    state = method.aggregate(clustered(ZERO_SIDED, -ZERO_SIDED), iter(updates))
    assert added == [[0.0, 0.0]]
    assert [center.tolist() for center in state.centers] == [[0.0, 0.0], [-2.0, 2.0]]


def test_a_client_trains_what_fits_its_training_split(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    method = hypcluster_of(linear_task(TrainingSettings()))
    payload = method.broadcast(clustered(ZERO_SIDED, -ZERO_SIDED), "a", key)
    data = ClientData(white([1]).train, white([0, 0, 0]).train)
    _, found = method.client_update(payload, None, data, 2, key)
    assert found.cluster == 1
    assert found.weights[0] < -2


@pytest.mark.parametrize("known_as", ["a", UNSEEN_CLIENT])
@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [([1], [0, 0], 0), ([1, 1], [0], 1), ([], [1], 1), ([], [], 1)],
)
def test_clients_are_served_what_fits_both_splits(
    linear_task: MakeTask,
    white: MakeClient,
    key: RandomKey,
    train: list[int],
    validation: list[int],
    expected: int,
    known_as: str,
) -> None:
    method = hypcluster_of(linear_task(TrainingSettings()))
    state = clustered(ZERO_SIDED, -ZERO_SIDED, largest=1)
    payload = method.broadcast(state, known_as, key)
    data = ClientData(white(train).train, white(validation).train)
    predictor = method.personalize(payload, None, data, key)
    assert predictor.describe() == {"cluster": float(expected)}
    probability = 1 / (1 + math.exp(-4 if expected == 0 else 4))
    served = predictor(white([0]).train.images)
    assert served[0].tolist() == pytest.approx([probability, 1 - probability])


def test_no_clusters_are_refused() -> None:
    problems: list[Problem] = []
    parse_settings(HypClusterSettings, {"num_clusters": 0}, "method", problems)
    (problem,) = problems
    assert problem.place == "method.num_clusters"
    assert "found 0, expected a number of at least 1" in problem.message
