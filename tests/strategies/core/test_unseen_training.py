"""Whoever trains when the rounds are over learns from both splits, in every method."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples, no_examples
from knnper.experiment import MultiStepSchedule, TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.training import (
    local_sgd,
    on_both_splits,
    pull,
    trained_on_both_splits,
    unseen_client_rate,
)
from knnper.strategies.ditto import DittoSettings
from tests.strategies.trained_methods import MakeClient, MakeTask

TRAINING = TrainingSettings(num_rounds=2, batch_size=3, learning_rate=0.1)


def test_the_rate_of_unseen_clients_is_that_of_the_first_round(
    linear_task: MakeTask,
) -> None:
    schedule = MultiStepSchedule(milestones=(2,))
    task = linear_task(replace(TRAINING, schedule=schedule))
    assert task.training.learning_rate_at(2) == pytest.approx(0.01)
    assert unseen_client_rate(task) == 0.1


def test_without_validation_data_it_trains_once(
    linear_task: MakeTask, white: MakeClient
) -> None:
    task, trained_on = linear_task(TRAINING), []

    def train(examples: Examples) -> ModelPredictor:
        trained_on.append(len(examples))
        return ModelPredictor(task, torch.full((2,), float(len(examples))))

    data = ClientData(white([0, 1, 1]).train, white([0]).train)
    found = on_both_splits(data, train)
    assert trained_on == [4]
    assert found.without_validation().weights.tolist() == [3.0, 3.0]
    assert found.without_validation().without_validation().weights[0] == 3.0

    trained_on.clear()
    found = on_both_splits(white([0, 1, 1]), train)
    assert found.without_validation() is found
    assert trained_on == [3]


def test_it_is_the_one_training_loop(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task, data = normed_task(TRAINING), noisy(6, 4, seed=1)
    start, head = task.initial_weights, task.head_mask
    hook = pull(start, 0.5, 0.2, 0.0)

    def alone(examples: Examples) -> Tensor:
        return local_sgd(
            task,
            start,
            examples,
            0.2,
            key,
            num_epochs=3,
            gradient_hook=hook,
            trainable=head,
        ).weights

    found = trained_on_both_splits(
        task,
        start,
        data,
        key,
        num_epochs=3,
        learning_rate=0.2,
        gradient_hook=hook,
        trainable=head,
    )
    assert torch.equal(found.weights, alone(data.train_and_validation()))
    assert torch.equal(found.without_validation().weights, alone(data.train))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ditto", DittoSettings(prox_weights=(0.1,))),
        *(
            (name, METHODS[name].settings_type())
            for name in (
                "apfl",
                "fed_mtl",
                "fedbn",
                "fedper",
                "fedrep",
                "l2gd",
                "lg_fedavg",
                "pfedme",
            )
        ),
    ],
)
def test_unseen_clients_of_all_methods_learn_from_the_same_data(
    name: str, settings: Any, normed_task: MakeTask, noisy: MakeClient
) -> None:
    task, data = normed_task(TRAINING), noisy(6, 4, seed=1)
    method = METHODS[name](task, settings)
    state = method.init(("a",), RandomKey(1))
    payload = method.broadcast(state, UNSEEN_CLIENT, RandomKey(2))
    nothing = no_examples(task.spec)

    def served(data: ClientData) -> ModelPredictor:
        predictor = method.personalize(payload, None, data, RandomKey(3))
        assert isinstance(predictor, ModelPredictor)
        return predictor

    found = served(data)
    both = served(ClientData(data.train_and_validation(), nothing))
    assert torch.equal(found.weights, both.weights)
    alone = served(ClientData(data.train, nothing))
    assert torch.equal(found.without_validation().weights, alone.weights)
    assert not torch.equal(found.weights, alone.weights)
    assert found.without_validation().describe() == alone.describe()
