import dataclasses
from typing import Any

import pytest
import torch

from knnper.data.examples import ClientData
from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.loading import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd, pull
from knnper.strategies.ditto import Ditto, DittoClientState, DittoSettings
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.local import Local, LocalSettings
from tests.strategies.method_checks import problems_of
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds

RIGHT, WRONG = torch.tensor([3.0, -3.0]), torch.tensor([-3.0, 3.0])  # of label 0


def served(
    task: Task,
    settings: DittoSettings,
    memory: DittoClientState | None,
    data: ClientData,
    weights: torch.Tensor | None = None,
) -> ModelPredictor:
    payload = ModelPayload(task.initial_weights if weights is None else weights)
    method = Ditto(task, settings)
    predictor = method.personalize(payload, memory, data, RandomKey(5))
    assert isinstance(predictor, ModelPredictor)
    return predictor


def test_a_round_by_hand(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(learning_rate=0.5, local_steps=2))
    method = Ditto(task, DittoSettings(prox_weights=(2.0, 0.0)))
    state, memory = run_rounds(method, {"a": white([0])}, num_rounds=1)

    def share(y: float) -> float:
        return float(torch.sigmoid(torch.tensor(-2 * y)))

    # Models (y, -y) with slope -σ(-2 y). w: y = ¼, then ¼ + ½ σ(-½).
    expected = 0.25 + 0.5 * share(0.25)
    assert state.weights.tolist() == pytest.approx([expected, -expected])
    # v with λ = 2: y ← (y + ½ σ(-2 y) + 0) / (1 + 1), so ⅛ first. With λ = 0 as w.
    near = (0.125 + 0.5 * share(0.125)) / 2
    assert memory["a"].personal[0].tolist() == pytest.approx([near, -near])
    assert memory["a"].personal[1].tolist() == pytest.approx([expected, -expected])


def test_the_global_model_is_fedavgs(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, learning_rate=0.1))
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    expected, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=3)
    found, _ = run_rounds(Ditto(task, DittoSettings()), clients, num_rounds=3)
    assert torch.equal(found.weights, expected.weights)


def test_without_a_pull_the_personal_model_is_local(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds, key: RandomKey
) -> None:
    # All examples of a client are alike, so that the keys of the order do not matter.
    task = linear_task(TrainingSettings(num_rounds=3, batch_size=2, local_epochs=2))
    clients = {"a": white([0] * 5), "b": white([1] * 2)}
    method = Ditto(task, DittoSettings(prox_weights=(0.0,)))
    _, memory = run_rounds(method, clients, num_rounds=3)
    for name, data in clients.items():
        payload = ModelPayload(task.initial_weights)
        alone = Local(task, LocalSettings()).personalize(payload, None, data, key)
        assert isinstance(alone, ModelPredictor)
        assert torch.equal(memory[name].personal[0], alone.weights)
    assert not torch.equal(memory["a"].personal[0], memory["b"].personal[0])


def test_without_a_pull_a_round_is_plain_training(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, learning_rate=0.1))
    data, start = noisy(7, 0, seed=1), task.initial_weights + 1
    memory, _ = Ditto(task, DittoSettings(prox_weights=(0.0,))).client_update(
        ModelPayload(task.initial_weights), DittoClientState((start,)), data, 1, key
    )
    expected = local_sgd(task, start, data.train, 0.1, key.child("personal"))
    assert torch.equal(memory.personal[0], expected.weights)


def test_an_infinite_pull_keeps_the_model_that_was_sent(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(batch_size=1, weight_decay=0.5))
    clients = {"a": white([0, 0, 1]), "b": white([1])}
    method = Ditto(task, DittoSettings(prox_weights=(1e30,)))
    sent, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=2)
    _, memory = run_rounds(method, clients, num_rounds=3)
    assert float(sent.weights.abs().max()) > 0
    for kept in memory.values():
        torch.testing.assert_close(kept.personal[0], sent.weights)


@pytest.mark.parametrize(
    ("models", "labels", "expected"),
    [
        ((WRONG, RIGHT, WRONG), [0, 0], 1.0),
        ((RIGHT, RIGHT, WRONG), [0, 0], 1.0),  # a tie: the larger λ
        ((RIGHT, WRONG, RIGHT), [0, 0], 4.0),
        ((WRONG, RIGHT, RIGHT), [], 4.0),  # nothing to choose on: the largest
    ],
)
def test_the_choice_is_made_on_validation_data(
    models: tuple[torch.Tensor, ...],
    labels: list[int],
    expected: float,
    linear_task: MakeTask,
    white: MakeClient,
) -> None:
    task, settings = linear_task(TrainingSettings()), DittoSettings((0.1, 1.0, 4.0))
    data = dataclasses.replace(white([1]), validation=white(labels).train)
    found = served(task, settings, DittoClientState(models), data)
    assert found.describe() == {"prox_weight": expected}
    assert torch.equal(found.weights, models[settings.prox_weights.index(expected)])
    assert found.without_validation() is found


def test_an_unseen_client_chooses_and_then_trains_on_both_splits(
    linear_task: MakeTask, white: MakeClient
) -> None:
    task = linear_task(TrainingSettings(batch_size=1, learning_rate=0.5))
    settings = DittoSettings((100.0, 0.01), unseen_epochs=4)
    data = dataclasses.replace(white([1, 1, 1]), validation=white([1, 1]).train)

    def pulled(prox_weight: float, examples: Any) -> torch.Tensor:
        hook = pull(RIGHT, prox_weight, 0.5, 0.0)
        rng = RandomKey(5)
        return local_sgd(
            task, RIGHT, examples, 0.5, rng, num_epochs=4, gradient_hook=hook
        ).weights

    # The global model is wrong about all labels: only the weak pull lets it learn.
    found = served(task, settings, None, data, weights=RIGHT)
    assert found.describe() == {"prox_weight": 0.01}
    assert torch.equal(found.weights, pulled(0.01, data.train_and_validation()))
    alone = found.without_validation()
    assert torch.equal(alone.weights, pulled(0.01, data.train))
    assert alone.describe() == found.describe()


def test_an_unseen_client_without_validation_data_stays_near(
    linear_task: MakeTask, white: MakeClient
) -> None:
    training = TrainingSettings(batch_size=1, learning_rate=0.5, weight_decay=0.1)
    task = linear_task(training)
    found = served(task, DittoSettings((0.01, 1e30)), None, white([1]), weights=RIGHT)
    assert found.describe() == {"prox_weight": 1e30}
    torch.testing.assert_close(found.weights, RIGHT)


def test_a_value_that_is_named_twice_is_refused() -> None:
    (problem,) = problems_of(Ditto, DittoSettings((1.0, 0.1, 1.0)))
    assert problem.place == "method.prox_weights"
    assert "found [1.0, 0.1, 1.0], expected values that all differ" in problem.message
    assert problems_of(Ditto, DittoSettings()) == ()


@pytest.mark.parametrize(
    ("prox_weights", "expected"),
    [([], "a list of at least 1"), ([-1.0], "a number of at least 0")],
)
def test_a_grid_without_sense_is_refused(
    prox_weights: list[float], expected: str
) -> None:
    document = {
        "name": "test",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "ditto", "prox_weights": prox_weights},
    }
    with pytest.raises(ConfigError, match=f"prox_weights.*{expected}"):
        load_experiment(document, experiment_catalogue())
