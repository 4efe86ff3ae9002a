"""Mapper in two stages: by hand, at both ends of λ, and what was trained on what."""

import pytest
import torch

import knnper.strategies.mapper_two_stage as module
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.fine_tuning import FineTuning, FineTuningSettings
from knnper.strategies.mapper_two_stage import TwoStageMapper, TwoStageSettings
from tests.strategies.method_checks import (
    count_trainings,
    labelled,
    mixture_served,
    problems_of,
)
from tests.strategies.trained_methods import MakeClient, MakeTask

SIGMA = 0.6224593  # σ(½), p(0) where the logits are (¼, -¼)

EVERYTHING = TrainingSettings(
    batch_size=3, learning_rate=0.1, momentum=0.9, weight_decay=0.01, num_rounds=2
)


def topped(task: Task, *cover: float) -> Method:
    settings = TwoStageSettings(cover or (0.0, 0.5, 1.0), local_epochs=2)
    return TwoStageMapper(task, FedAvg(task, NoSettings()), settings)


def test_by_hand(linear_task: MakeTask, white: MakeClient) -> None:
    task = linear_task(TrainingSettings(learning_rate=0.5))
    found = mixture_served(topped(task, 0.3), torch.zeros(2), white([0]))
    central, own = found.components
    # The local model's own loss, whatever λ is: ½ · ½, then ½ (1 - σ(½)).
    expected = 0.25 + 0.5 * (1 - SIGMA)
    assert central.tolist() == [0.0, 0.0]
    assert float(own[0]) == pytest.approx(expected, abs=1e-6)
    assert found.mixture_weights.tolist() == pytest.approx([0.7, 0.3])


def test_no_weight_is_the_method(normed_task: MakeTask, noisy: MakeClient) -> None:
    task, data = normed_task(EVERYTHING), noisy(9, 4, seed=1)
    found = mixture_served(topped(task, 0.0), task.initial_weights, data)
    queries = noisy(5, 0, seed=9).train.images
    expected = task.probabilities(task.initial_weights, queries)
    assert torch.equal(found(queries), expected)


def test_all_weight_is_fine_tuning(normed_task: MakeTask, noisy: MakeClient) -> None:
    task, data = normed_task(EVERYTHING), noisy(9, 4, seed=1)
    found = mixture_served(topped(task, 1.0), task.initial_weights, data)
    tuned = FineTuning(task, FedAvg(task, NoSettings()), FineTuningSettings(2))
    payload = ModelPayload(task.initial_weights)
    expected = tuned.personalize(payload, None, data, RandomKey(6))
    queries = noisy(5, 0, seed=9).train.images
    assert torch.equal(found(queries), expected(queries))


def test_the_choice_has_not_seen_validation(
    linear_task: MakeTask, white: MakeClient
) -> None:
    task = linear_task(TrainingSettings(learning_rate=5.0, batch_size=1))
    # Trained on both splits, the local model knows the validation label best.
    data = labelled(white, [0], [1] * 9)
    found = mixture_served(topped(task, 0.0, 1.0), torch.zeros(2), data)
    assert found.describe() == {"interpolation_weight": 0.0}
    before, after = found.without_validation(), found
    assert float(before.components[1][0]) > 0 > float(after.components[1][0])
    assert before.without_validation() is before


def test_on_top_of_what_was_trained_on_validation(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    task, data = normed_task(EVERYTHING), noisy(9, 4, seed=1)
    tuned = FineTuning(task, FedAvg(task, NoSettings()), FineTuningSettings(1))
    method = TwoStageMapper(task, tuned, TwoStageSettings((0.5,)))
    payload = ModelPayload(task.initial_weights)
    base = tuned.personalize(payload, None, data, RandomKey(6))
    assert isinstance(base, ModelPredictor)
    found = mixture_served(method, task.initial_weights, data)
    assert torch.equal(found.components[0], base.weights)
    alone = found.without_validation()
    assert torch.equal(alone.components[0], base.without_validation().weights)


@pytest.mark.parametrize(("num_validation", "expected"), [(4, [9, 13]), (0, [9])])
def test_without_validation_data_nothing_is_trained_anew(
    num_validation: int,
    expected: list[int],
    normed_task: MakeTask,
    noisy: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, data = normed_task(EVERYTHING), noisy(9, num_validation, seed=1)
    trainings = count_trainings(monkeypatch, module)
    found = mixture_served(topped(task), task.initial_weights, data)
    assert trainings == expected
    assert (found.without_validation() is found) == (num_validation == 0)


def test_a_value_that_is_named_twice_is_refused() -> None:
    (problem,) = problems_of(TwoStageMapper, TwoStageSettings((0.5, 1.0, 0.5)))
    assert problem.place == "personalization.interpolation_weights"
    assert "found [0.5, 1.0, 0.5], expected values that all differ" in problem.message
    assert problems_of(TwoStageMapper, TwoStageSettings()) == ()
