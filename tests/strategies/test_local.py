import pytest
import torch

from knnper.data.examples import ClientData
from knnper.errors import RunError
from knnper.experiment import (
    MultiStepSchedule,
    TrainingSettings,
)
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.task import Task
from knnper.strategies.local import Local, LocalSettings
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    white,
)

TRAINING = TrainingSettings(
    num_rounds=3,
    batch_size=2,
    learning_rate=0.1,
    momentum=0.5,
    schedule=MultiStepSchedule(milestones=(2,)),
)


def train_alone(
    task: Task, data: ClientData, num_rounds: int | None = None
) -> torch.Tensor:
    method = Local(task, LocalSettings(num_rounds))
    payload = method.broadcast(method.init(["a"], KEY), UNSEEN_CLIENT, KEY)
    return one_model_of(method, payload, None, data).weights


def test_is_fedavg_with_one_client() -> None:
    task, data = normed_task(TRAINING), noisy(7, 0, seed=1)
    state, _ = run_rounds(of_name("fedavg", task), {"a": data}, num_rounds=3)
    assert torch.equal(train_alone(task, data), state.weights)


def test_one_round_by_hand() -> None:
    task = linear_task(learning_rate=1.0, num_rounds=9)
    # One step from 0 on label 0: p = (½, ½), so w = -(½ - 1, ½).
    weights = train_alone(task, white([0, 0]), num_rounds=1)
    assert weights.tolist() == [0.5, -0.5]


def test_has_no_rounds() -> None:
    method = Local(linear_task(TRAINING), LocalSettings())
    assert method.num_rounds == 0
    with pytest.raises(RunError, match="Local has no rounds of training"):
        method.client_update(None, None, None, 1, None)
    with pytest.raises(RunError, match="Local has no rounds of training"):
        method.aggregate(None, iter([]))
