"""Fine-tuning of all weights and of the head: by hand, rates, clients without data."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData
from knnper.experiment import MultiStepSchedule
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from tests.strategies.tiny import (
    linear_task,
    noisy,
    normed_task,
    one_model_of,
    topped,
    white,
)

LAST = MultiStepSchedule(milestones=(4,), factor=0.1)


def tuned(on_top: str, task: Task, data: ClientData, **settings: Any) -> Tensor:
    method = topped(on_top, task, **settings)
    payload = ModelPayload(task.initial_weights)
    return one_model_of(method, payload, None, data).weights


@pytest.mark.parametrize(
    ("data", "training", "settings", "expected"),
    [
        # From w = 0 on x = 1: p = (½, ½), so the gradient at label 1 is (½, -½).
        (white([1]), {"learning_rate": 9.0}, {"learning_rate": 0.1}, 0.05),
        # Labels 1 (train) and 1, 0, 1 (validation) in one batch: mean (¼, -¼).
        (white([1], [1, 0, 1]), {}, {"learning_rate": 0.1}, 0.025),
        # The rate is by default that of the last round.
        (
            white([1]),
            {"num_rounds": 4, "learning_rate": 1.0, "schedule": LAST},
            {},
            0.05,
        ),
        # The number of epochs is its own.
        *(
            (
                white([1]),
                {"local_steps": num_steps, "batch_size": 1},
                {"num_epochs": 2, "learning_rate": 0.1},
                0.05 + 0.1 / (1 + math.exp(0.1)),
            )
            for num_steps in (None, 5)
        ),
    ],
)
def test_fine_tuning_by_hand(
    data: ClientData,
    training: dict[str, Any],
    settings: dict[str, Any],
    expected: float,
) -> None:
    weights = tuned("fine_tuning", linear_task(**training), data, **settings)
    assert weights.tolist() == pytest.approx([-expected, expected])


def test_two_epochs_of_a_probe_by_hand() -> None:
    # The model is all head. Label 1, rate 1: from w = 0 the gradient is (½, -½), so
    # w = (-½, ½); then p_0 = 1 / (1 + e) = 0.2689414 and w = (-½ - p_0, ½ + p_0).
    settings = {"num_epochs": 2, "learning_rate": 1.0}
    weights = tuned("linear_probe", linear_task(), white([1]), **settings)
    torch.testing.assert_close(weights, torch.tensor([-0.7689414, 0.7689414]))


def test_only_the_head_moves() -> None:
    task = normed_task(batch_size=4, weight_decay=0.1, momentum=0.5)
    settings = {"num_epochs": 3, "learning_rate": 0.1}
    moved = tuned("linear_probe", task, noisy(9, 3, seed=1), **settings)
    assert torch.equal(moved != task.initial_weights, task.head_mask)
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
    probed = tuned("linear_probe", task, data, num_epochs=1, learning_rate=0.5)
    head = task.model.named(probed)["classifier.weight"]
    expected = task.model.named(weights)["classifier.weight"] - 0.5 * gradient
    torch.testing.assert_close(head, expected)
