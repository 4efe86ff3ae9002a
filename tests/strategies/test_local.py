import pytest
import torch

from knnper.data.examples import ClientData
from knnper.errors import RunError
from knnper.experiment import MultiStepSchedule, TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NEWCOMER, NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.local import Local, LocalSettings
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    one_model_of,
    white,
)

TRAINING = TrainingSettings(
    num_rounds=3,
    batch_size=2,
    learning_rate=0.1,
    momentum=0.5,
    schedule=MultiStepSchedule(milestones=(2,)),
)


def served_alone(
    task: Task, data: ClientData, key: RandomKey, num_rounds: int | None = None
) -> ModelPredictor:
    method = Local(task, LocalSettings(num_rounds))
    state = method.init(["a"], key)
    payload = method.broadcast(state, NEWCOMER, key)
    return one_model_of(method, payload, None, data, key)


def train_alone(
    task: Task, data: ClientData, key: RandomKey, num_rounds: int | None = None
) -> torch.Tensor:
    return served_alone(task, data, key, num_rounds).weights


def test_is_fedavg_with_one_client() -> None:
    task, data = normed_task(TRAINING), noisy(7, 0, seed=1)
    method = FedAvg(task, NoSettings())
    state = method.init(["a"], KEY)
    for server_round in (1, 2, 3):
        payload = method.broadcast(state, "a", KEY)
        rng = KEY.child("round", server_round)
        _, update = method.client_update(payload, None, data, server_round, rng)
        state = method.aggregate(state, iter([("a", update)]))
    assert torch.equal(train_alone(task, data, KEY), state.weights)


def test_trains_on_both_splits() -> None:
    task, data = normed_task(TRAINING), noisy(7, 3, seed=1)
    together = ClientData(data.train_and_validation(), noisy(7, 0, seed=1).validation)
    served = served_alone(task, data, KEY)
    assert torch.equal(served.weights, train_alone(task, together, KEY))
    expected = train_alone(task, noisy(7, 0, seed=1), KEY)
    assert torch.equal(served.without_validation().weights, expected)
    assert not torch.equal(served.weights, expected)


def test_one_round_by_hand() -> None:
    task = linear_task(learning_rate=1.0, num_rounds=9)
    # One step from 0 on label 0: p = (½, ½), so w = -(½ - 1, ½).
    weights = train_alone(task, white([0, 0]), KEY, num_rounds=1)
    assert weights.tolist() == [0.5, -0.5]


def test_the_number_of_rounds_can_be_set() -> None:
    task, data = normed_task(TRAINING), noisy(7, 2, seed=1)
    default = train_alone(task, data, KEY)
    assert torch.equal(default, train_alone(task, data, KEY, num_rounds=3))
    assert not torch.equal(default, train_alone(task, data, KEY, num_rounds=2))


def test_has_no_rounds() -> None:
    method = Local(linear_task(TRAINING), LocalSettings())
    assert method.num_rounds == 0
    with pytest.raises(RunError, match="Local has no rounds of training"):
        method.client_update(None, None, None, 1, None)
    with pytest.raises(RunError, match="Local has no rounds of training"):
        method.aggregate(None, iter([]))
