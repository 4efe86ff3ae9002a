"""FedAvg+: one hand-computed step, its rate, and clients without data."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.experiment import MultiStepSchedule, TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings
from tests.strategies.trained_methods import MakeTask

White = Callable[[Sequence[int]], ClientData]


def fedavg_plus(task: Task, settings: FineTuningSettings) -> Method:
    return FineTuning(task, FedAvg(task, NoSettings()), settings)


def tuned_weights(task: Task, data: ClientData, **settings: Any) -> Tensor:
    method = fedavg_plus(task, FineTuningSettings(**settings))
    predictor = method.personalize(
        ModelPayload(torch.zeros(2)), None, data, RandomKey(3)
    )
    assert isinstance(predictor, ModelPredictor)
    return predictor.weights


def test_one_step_by_hand(linear_task: MakeTask, white: White) -> None:
    # From w = 0 on x = 1: p = (1/2, 1/2), so the gradient at label 1 is (1/2, -1/2).
    task = linear_task(TrainingSettings(learning_rate=9.0))
    weights = tuned_weights(task, white([1]), learning_rate=0.1)

    torch.testing.assert_close(weights, torch.tensor([-0.05, 0.05]))


def test_validation_data_is_learnt_from_too(
    linear_task: MakeTask, white: White
) -> None:
    # Labels 1 (train) and 1, 0, 1 (validation) in one batch: mean gradient (1/4, -1/4).
    validation = white([1, 0, 1]).train
    data = ClientData(white([1]).train, validation)
    weights = tuned_weights(linear_task(TrainingSettings()), data, learning_rate=0.1)

    torch.testing.assert_close(weights, torch.tensor([-0.025, 0.025]))


def test_the_rate_is_by_default_that_of_the_last_round(
    linear_task: MakeTask, white: White
) -> None:
    schedule = MultiStepSchedule(milestones=(4,), factor=0.1)
    training = TrainingSettings(num_rounds=4, learning_rate=1.0, schedule=schedule)
    weights = tuned_weights(linear_task(training), white([1]))

    torch.testing.assert_close(weights, torch.tensor([-0.05, 0.05]))


@pytest.mark.parametrize("local_steps", [None, 5])
def test_the_number_of_epochs_is_its_own(
    linear_task: MakeTask, white: White, local_steps: int | None
) -> None:
    training = TrainingSettings(local_steps=local_steps, batch_size=1)
    weights = tuned_weights(
        linear_task(training), white([1]), num_epochs=2, learning_rate=0.1
    )
    probability = 1 / (1 + torch.exp(torch.tensor(0.1)))
    expected = torch.tensor([-0.05, 0.05]) + 0.1 * probability * torch.tensor(
        [-1.0, 1.0]
    )

    torch.testing.assert_close(weights, expected)


def test_a_client_without_data_serves_the_global_model(
    linear_task: MakeTask, white: White
) -> None:
    task = linear_task(TrainingSettings())
    method = fedavg_plus(task, FineTuningSettings())
    weights, none = torch.tensor([0.3, -0.2]), white([])
    images = white([0, 1]).train.images
    predictor = method.personalize(ModelPayload(weights), None, none, RandomKey(3))

    assert torch.equal(predictor(images), task.probabilities(weights, images))
    assert predictor.describe() == {}


def test_the_payload_is_left_as_it_is(linear_task: MakeTask, white: White) -> None:
    task = linear_task(TrainingSettings())
    payload = ModelPayload(torch.zeros(2))
    fedavg_plus(task, FineTuningSettings()).personalize(
        payload, None, white([1]), RandomKey(3)
    )

    assert payload.weights.tolist() == [0.0, 0.0]


def test_the_order_of_examples_is_fixed_by_the_key(
    linear_task: MakeTask,
) -> None:
    images = torch.tensor([10, 200, 90], dtype=torch.uint8).view(3, 1, 1, 1)
    train = Examples(images, torch.tensor([0, 1, 0]))
    data = ClientData(train, train.take(torch.empty(0, dtype=torch.int64)))
    task = linear_task(TrainingSettings(batch_size=1))
    once = tuned_weights(task, data, learning_rate=2.0)
    again = tuned_weights(task, data, learning_rate=2.0)

    assert torch.equal(once, again)
