import math
from collections import Counter

import pytest
import torch

from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.task import Task
from knnper.strategies.hypcluster import (
    ClusterModels,
    ClusterUpdate,
    HypCluster,
    HypClusterSettings,
    HypClusterState,
    best_position,
)
from tests.strategies.tiny import KEY, linear_task, one_model_of, run_rounds, white

ZERO_SIDED = torch.tensor([2.0, -2.0])
"""Predicts label 0 of a white pixel; its negative predicts 1."""


def hypcluster_of(task: Task, num_clusters: int = 2) -> HypCluster:
    return HypCluster(task, HypClusterSettings(num_clusters))


def clustered(*centers: torch.Tensor, largest: int = 0) -> HypClusterState:
    return HypClusterState(centers, largest, {})


def update(weights: list[float], num_examples: int, cluster: int) -> ClusterUpdate:
    return ClusterUpdate(torch.tensor(weights), num_examples, 0.5, cluster)


def test_two_rounds_by_hand() -> None:
    method = hypcluster_of(linear_task(learning_rate=4.0))
    clients = {"a": white([0]), "b": white([1, 1])}
    first, _ = run_rounds(method, clients, num_rounds=1)
    # From 0, y_a = 0 - 4 (½ - 1, ½) = (2, -2) and y_b = (-2, 2): two groups of one.
    deal = method.init(["a", "b"], KEY.child("init")).deal
    assert first.centers[deal["a"]].tolist() == [2.0, -2.0]
    assert first.centers[deal["b"]].tolist() == [-2.0, 2.0]
    assert first.largest == deal["b"]
    # Each chooses the model that predicts its label, and steps by 4 (1 - σ(4)).
    second, _ = run_rounds(method, clients, num_rounds=2)
    expected = 2 + 4 / (1 + math.exp(4))
    assert float(second.centers[deal["a"]][0]) == pytest.approx(expected)
    assert float(second.centers[deal["b"]][0]) == pytest.approx(-expected)
    assert second.deal == {}


def test_clients_are_dealt_evenly_and_at_random() -> None:
    method = hypcluster_of(linear_task(), num_clusters=3)
    names = [f"client {number:02d}" for number in range(20)]
    deal = method.init(names, KEY).deal
    assert sorted(Counter(deal.values()).values()) == [6, 7, 7]
    assert method.init(names, KEY).deal == deal
    assert method.init(names, KEY.child("other")).deal != deal


def test_groups_are_means_and_an_empty_one_that_of_all() -> None:
    method = hypcluster_of(linear_task(), num_clusters=3)
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


def test_only_the_chosen_cluster_moves() -> None:
    method = hypcluster_of(linear_task())
    before = clustered(ZERO_SIDED, -ZERO_SIDED)
    updates = [("a", update([4.0, 0.0], 1, 1)), ("b", update([0.0, 4.0], 3, 1))]
    state = method.aggregate(before, iter(updates))
    assert state.centers[0] is before.centers[0]
    assert state.centers[1].tolist() == [1.0, 3.0]
    assert state.largest == 1


def test_a_cluster_that_there_is_not_has_no_model() -> None:
    method = hypcluster_of(linear_task())
    claimed = (7, 8, -1, 0, 2)
    updates = [(f"client {k}", update([float(k), 0.0], 1, k)) for k in claimed]
    state = method.aggregate(clustered(ZERO_SIDED, -ZERO_SIDED), iter(updates))
    assert [center.tolist() for center in state.centers] == [[0.0, 0.0], [-2.0, 2.0]]
    assert state.largest == 0


@pytest.mark.parametrize("known_as", ["a", UNSEEN_CLIENT])
@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [([1], [0, 0], 0), ([1, 1], [0], 1), ([], [1], 1), ([], [], 1)],
)
def test_clients_are_served_what_fits_both_splits(
    train: list[int], validation: list[int], expected: int, known_as: str
) -> None:
    method = hypcluster_of(linear_task())
    state = clustered(ZERO_SIDED, -ZERO_SIDED, largest=1)
    payload = method.broadcast(state, known_as, KEY)
    data = white(train, validation)
    predictor = method.personalize(payload, None, data, KEY)
    assert predictor.describe() == {"cluster": float(expected)}
    probability = 1 / (1 + math.exp(-4 if expected == 0 else 4))
    served = predictor(white([0]).train.images)
    assert served[0].tolist() == pytest.approx([probability, 1 - probability])


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
    payload = models(ZERO_SIDED, -ZERO_SIDED)
    update = ClusterUpdate(torch.zeros(length), 1, 0.5, cluster)
    assert hypcluster_of(linear_task()).update_problem(payload, update) == problem


ZERO = torch.zeros(2)


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        # -log σ(±4) is 0.018 or 4.018, and log 2 = 0.69 at 0; of both labels the mean
        # is 2.02 or 0.69.
        ((ZERO_SIDED, -ZERO_SIDED, ZERO), [[0]], 0),
        ((ZERO_SIDED, -ZERO_SIDED, ZERO), [[1, 1]], 1),
        ((ZERO_SIDED, -ZERO_SIDED, ZERO), [[0, 1]], 2),
        # Parts are weighed by their examples.
        ((ZERO_SIDED, -ZERO_SIDED), [[0], [1, 1]], 1),
        ((ZERO_SIDED, -ZERO_SIDED), [[0]], 0),
        # Ties go to the first, and nothing to the default.
        ((ZERO_SIDED, ZERO_SIDED.clone()), [[0]], 0),
        ((ZERO_SIDED, ZERO_SIDED.clone()), [[]], 1),
        # A model without a loss is not chosen.
        ((torch.tensor([float("nan"), 0.0]), ZERO_SIDED), [[1]], 1),
    ],
)
def test_the_lowest_loss_wins(
    weights: tuple[torch.Tensor, ...], parts: list[list[int]], expected: int
) -> None:
    payload, given = (
        models(*weights, default=1),
        [white(labels).train for labels in parts],
    )
    assert best_position(linear_task(), payload, given) == expected


def test_the_chosen_model_is_trained_and_served() -> None:
    method = hypcluster_of(linear_task(learning_rate=1.0))
    # By the training split alone: the other label would choose the first model.
    payload, data = models(-ZERO_SIDED, torch.zeros(2)), white([0], [1, 1])
    _, sent = method.client_update(payload, None, data, 1, KEY)
    # From 0 the gradient of label 0 is ½ - 1.
    assert sent.weights.tolist() == [0.5, -0.5]
    assert (sent.cluster, sent.num_examples) == (11, 1)
    assert method.started_from(payload, sent)["weights"] is payload.models[1]
    predictor = one_model_of(method, payload, None, white([0]))
    assert predictor.weights is payload.models[1]
    assert predictor.describe() == {"cluster": 11.0}
