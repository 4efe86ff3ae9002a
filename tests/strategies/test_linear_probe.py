"""LP trains the head alone; by hand, and on a model with a body."""

from collections.abc import Callable, Sequence

import torch

from knnper.data.examples import ClientData
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings
from knnper.strategies.linear_probe import LinearProbe, LinearProbeSettings
from tests.strategies.trained_methods import MakeTask


def probed(task: Task, data: ClientData, settings: LinearProbeSettings) -> torch.Tensor:
    method = LinearProbe(task, FedAvg(task, NoSettings()), settings)
    payload = ModelPayload(task.initial_weights)
    predictor = method.personalize(payload, None, data, RandomKey(3))
    assert isinstance(predictor, ModelPredictor)
    return predictor.weights


def test_two_epochs_by_hand(
    linear_task: MakeTask, white: Callable[[Sequence[int]], ClientData]
) -> None:
    # The model is all head. Label 1, rate 1: from w = 0 the gradient is (½, -½), so
    # w = (-½, ½); then p_0 = 1 / (1 + e) = 0.2689414 and w = (-½ - p_0, ½ + p_0).
    settings = LinearProbeSettings(num_epochs=2, learning_rate=1.0)
    weights = probed(linear_task(TrainingSettings()), white([1]), settings)
    torch.testing.assert_close(weights, torch.tensor([-0.7689414, 0.7689414]))


def test_only_the_head_moves(
    normed_task: MakeTask, noisy: Callable[..., ClientData]
) -> None:
    task = normed_task(TrainingSettings(batch_size=4, weight_decay=0.1, momentum=0.5))
    settings = LinearProbeSettings(num_epochs=3, learning_rate=0.1)
    moved = probed(task, noisy(9, 3, seed=1), settings) != task.initial_weights
    assert torch.equal(moved, task.head_mask)
    assert task.head_mask.sum() == 4 * 3 + 3


def test_the_body_is_the_one_that_serves(
    normed_task: MakeTask, noisy: Callable[..., ClientData]
) -> None:
    """BatchNorm normalises as it will when the client predicts."""
    task = normed_task(TrainingSettings(batch_size=12))
    data = noisy(9, 3, seed=1)
    both = data.train_and_validation()
    weights = task.initial_weights
    features = task.embed(weights, both.images)
    probabilities = task.probabilities(weights, both.images)
    error = probabilities - torch.nn.functional.one_hot(both.labels, 3)
    gradient = error.T @ features / len(both)
    settings = LinearProbeSettings(num_epochs=1, learning_rate=0.5)
    found = task.model.named(probed(task, data, settings))["classifier.weight"]
    expected = task.model.named(weights)["classifier.weight"] - 0.5 * gradient
    torch.testing.assert_close(found, expected)


def test_of_a_model_that_is_all_head_it_is_fine_tuning(
    linear_task: MakeTask, white: Callable[[Sequence[int]], ClientData]
) -> None:
    task, data = linear_task(TrainingSettings()), white([0, 1, 1])
    tuning = FineTuningSettings(num_epochs=3, learning_rate=0.2)
    method = FineTuning(task, FedAvg(task, NoSettings()), tuning)
    payload = ModelPayload(task.initial_weights)
    expected = method.personalize(payload, None, data, RandomKey(3))
    assert isinstance(expected, ModelPredictor)
    found = probed(task, data, LinearProbeSettings(num_epochs=3, learning_rate=0.2))
    assert torch.equal(found, expected.weights)
