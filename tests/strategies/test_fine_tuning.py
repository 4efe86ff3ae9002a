"""Fine-tuning of all weights and of the head: by hand, rates, clients without data."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData
from knnper.experiment import MultiStepSchedule
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings
from knnper.strategies.linear_probe import LinearProbe, LinearProbeSettings
from tests.strategies.tiny import (
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    white,
)

White = Callable[[Sequence[int]], ClientData]


def fedavg_plus(task: Task, settings: FineTuningSettings) -> Method:
    return FineTuning(task, of_name("fedavg", task), settings)


def tuned_weights(task: Task, data: ClientData, **settings: Any) -> Tensor:
    method = fedavg_plus(task, FineTuningSettings(**settings))
    predictor = one_model_of(
        method, ModelPayload(torch.zeros(2)), None, data, RandomKey(3)
    )
    return predictor.weights


def test_one_step_by_hand() -> None:
    # From w = 0 on x = 1: p = (1/2, 1/2), so the gradient at label 1 is (1/2, -1/2).
    task = linear_task(learning_rate=9.0)
    weights = tuned_weights(task, white([1]), learning_rate=0.1)

    torch.testing.assert_close(weights, torch.tensor([-0.05, 0.05]))


def test_validation_data_is_learnt_from_too() -> None:
    # Labels 1 (train) and 1, 0, 1 (validation) in one batch: mean gradient (1/4, -1/4).
    validation = white([1, 0, 1]).train
    data = ClientData(white([1]).train, validation)
    weights = tuned_weights(linear_task(), data, learning_rate=0.1)

    torch.testing.assert_close(weights, torch.tensor([-0.025, 0.025]))


def test_the_rate_is_by_default_that_of_the_last_round() -> None:
    schedule = MultiStepSchedule(milestones=(4,), factor=0.1)
    weights = tuned_weights(
        linear_task(num_rounds=4, learning_rate=1.0, schedule=schedule), white([1])
    )

    torch.testing.assert_close(weights, torch.tensor([-0.05, 0.05]))


@pytest.mark.parametrize("local_steps", [None, 5])
def test_the_number_of_epochs_is_its_own(local_steps: int | None) -> None:
    weights = tuned_weights(
        linear_task(local_steps=local_steps, batch_size=1),
        white([1]),
        num_epochs=2,
        learning_rate=0.1,
    )
    probability = 1 / (1 + torch.exp(torch.tensor(0.1)))
    expected = torch.tensor([-0.05, 0.05]) + 0.1 * probability * torch.tensor(
        [-1.0, 1.0]
    )

    torch.testing.assert_close(weights, expected)


def test_a_client_without_data_serves_the_global_model() -> None:
    task = linear_task()
    method = fedavg_plus(task, FineTuningSettings())
    weights, none = torch.tensor([0.3, -0.2]), white([])
    images = white([0, 1]).train.images
    predictor = method.personalize(ModelPayload(weights), None, none, RandomKey(3))

    assert torch.equal(predictor(images), task.probabilities(weights, images))
    assert predictor.describe() == {}


def probed(task: Task, data: ClientData, settings: LinearProbeSettings) -> torch.Tensor:
    method = LinearProbe(task, of_name("fedavg", task), settings)
    payload = ModelPayload(task.initial_weights)
    predictor = one_model_of(method, payload, None, data, RandomKey(3))
    return predictor.weights


def test_two_epochs_by_hand() -> None:
    # The model is all head. Label 1, rate 1: from w = 0 the gradient is (½, -½), so
    # w = (-½, ½); then p_0 = 1 / (1 + e) = 0.2689414 and w = (-½ - p_0, ½ + p_0).
    settings = LinearProbeSettings(num_epochs=2, learning_rate=1.0)
    weights = probed(linear_task(), white([1]), settings)
    torch.testing.assert_close(weights, torch.tensor([-0.7689414, 0.7689414]))


def test_only_the_head_moves() -> None:
    task = normed_task(batch_size=4, weight_decay=0.1, momentum=0.5)
    settings = LinearProbeSettings(num_epochs=3, learning_rate=0.1)
    moved = probed(task, noisy(9, 3, seed=1), settings) != task.initial_weights
    assert torch.equal(moved, task.head_mask)
    assert task.head_mask.sum() == 4 * 3 + 3


def test_the_body_is_the_one_that_serves() -> None:
    """BatchNorm normalises as it will when the client predicts."""
    task = normed_task(batch_size=12)
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


def test_of_a_model_that_is_all_head_it_is_fine_tuning() -> None:
    task, data = linear_task(), white([0, 1, 1])
    tuning = FineTuningSettings(num_epochs=3, learning_rate=0.2)
    method = FineTuning(task, of_name("fedavg", task), tuning)
    payload = ModelPayload(task.initial_weights)
    expected = one_model_of(method, payload, None, data, RandomKey(3))
    found = probed(task, data, LinearProbeSettings(num_epochs=3, learning_rate=0.2))
    assert torch.equal(found, expected.weights)
