import pytest
import torch

from knnper.data.examples import no_examples
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.clusters import (
    ClusterModels,
    ClusterUpdate,
    best_position,
    cluster_problem,
    serve_best,
    train_best,
)
from tests.strategies.trained_methods import MakeClient, MakeTask

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
def test_the_lowest_loss_wins(
    linear_task: MakeTask, white: MakeClient, labels: list[int], expected: int
) -> None:
    # -log σ(±4) is 0.018 or 4.018, and log 2 = 0.69 at 0; of both labels the mean is
    # 2.02 or 0.69.
    task = linear_task(TrainingSettings())
    payload = models(ONE_SIDED, -ONE_SIDED, torch.zeros(2))
    assert best_position(task, payload, (white(labels).train,)) == expected


def test_parts_are_weighed_by_their_examples(
    linear_task: MakeTask, white: MakeClient
) -> None:
    task = linear_task(TrainingSettings())
    payload = models(ONE_SIDED, -ONE_SIDED)
    few, many = white([0]).train, white([1, 1]).train
    assert best_position(task, payload, (few, many)) == 1
    assert best_position(task, payload, (few,)) == 0


def test_ties_go_to_the_first_and_nothing_to_the_default(
    linear_task: MakeTask, white: MakeClient
) -> None:
    task = linear_task(TrainingSettings())
    payload = models(ONE_SIDED, ONE_SIDED.clone(), default=1)
    assert best_position(task, payload, (white([0]).train,)) == 0
    assert best_position(task, payload, (no_examples(task.spec),)) == 1


def test_a_model_without_a_loss_is_not_chosen(
    linear_task: MakeTask, white: MakeClient
) -> None:
    task = linear_task(TrainingSettings())
    broken = torch.tensor([float("nan"), 0.0])
    assert best_position(task, models(broken, ONE_SIDED), (white([1]).train,)) == 1


def test_the_chosen_model_is_trained_and_served(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings())
    payload, data = models(-ONE_SIDED, torch.zeros(2)), white([0])
    update = train_best(task, payload, (data.train,), data.train, 1.0, key)
    # From 0 the gradient of label 0 is ½ - 1.
    assert update.weights.tolist() == [0.5, -0.5]
    assert (update.cluster, update.num_examples) == (11, 1)
    predictor = serve_best(task, payload, (data.train,))
    assert predictor.weights is payload.models[1]
    assert predictor.describe() == {"cluster": 11.0}
