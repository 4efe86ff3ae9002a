import pytest
import torch
from torch import Tensor

from knnper.data.examples import Examples
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.strategies.core.training import local_sgd, pull
from knnper.strategies.fed_mtl import FedMTL, FedMTLSettings
from knnper.strategies.local import Local, LocalSettings
from tests.strategies.method_checks import trained_with_the_keys_of_local
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds


def sigmoid(logit: float) -> float:
    return float(torch.sigmoid(torch.tensor(logit, dtype=torch.float64)))


def test_two_rounds_by_hand(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(learning_rate=0.5))
    method = FedMTL(task, FedMTLSettings(prox_weight=2.0))
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=2)
    # Models (y, -y); η λ = 1, so y ← (y - ½ g + w̄) / 2. Round 1, all at 0 and g = ∓½:
    # y_a = ⅛, y_b = -⅛, w̄ = ¾ · ⅛ - ¼ · ⅛ = 1/16.
    # Round 2, g_a = -σ(-¼) and g_b = σ(-¼), each from its own y.
    share = sigmoid(-0.25)
    of_a = (0.125 + 0.5 * share + 0.0625) / 2
    of_b = (-0.125 - 0.5 * share + 0.0625) / 2
    assert memory["a"].weights.tolist() == pytest.approx([of_a, -of_a])
    assert memory["b"].weights.tolist() == pytest.approx([of_b, -of_b])
    mean = 0.75 * of_a + 0.25 * of_b
    assert state.weights.tolist() == pytest.approx([mean, -mean])


def test_without_a_pull_it_is_local(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    training = TrainingSettings(
        num_rounds=3, batch_size=3, learning_rate=0.1, weight_decay=0.01
    )
    task = normed_task(training)
    clients = {"a": noisy(7, 2, seed=1), "b": noisy(4, 2, seed=2)}

    def trained(prox_weight: float) -> dict[str, Tensor]:
        method = FedMTL(task, FedMTLSettings(prox_weight))
        return trained_with_the_keys_of_local(method, task, clients, key)

    alone, pulled = trained(0.0), trained(0.5)
    for name, data in clients.items():
        payload = ModelPayload(task.initial_weights)
        predictor = Local(task, LocalSettings()).personalize(payload, None, data, key)
        assert isinstance(predictor, ModelPredictor)
        served = predictor.without_validation()
        assert torch.equal(alone[name], served.weights)
        assert not torch.equal(pulled[name], served.weights)


def test_an_infinite_pull_ends_at_the_mean(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings(weight_decay=0.5))
    method = FedMTL(task, FedMTLSettings(1e30))
    payload, own = ModelPayload(torch.ones(2)), ModelState(torch.tensor([5.0, -4.0]))
    memory, update = method.client_update(payload, own, white([0, 1]), 1, key)
    torch.testing.assert_close(memory.weights, torch.ones(2))
    assert torch.equal(update.weights, memory.weights)


def test_a_seen_client_is_served_its_own_model(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    method = FedMTL(linear_task(TrainingSettings()), FedMTLSettings())
    payload, own = ModelPayload(torch.ones(2)), ModelState(torch.tensor([5.0, -4.0]))
    served = method.personalize(payload, own, white([0]), key)
    assert isinstance(served, ModelPredictor)
    assert torch.equal(served.weights, own.weights)
    assert not method.serves_global_model
    assert not method.personalizes_by_inference


def test_an_unseen_client_trains_on_both_splits(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    training = TrainingSettings(
        num_rounds=2, batch_size=3, learning_rate=0.1, weight_decay=0.01
    )
    task, data = normed_task(training), noisy(6, 4, seed=1)
    method = FedMTL(task, FedMTLSettings(prox_weight=0.3, unseen_epochs=3))
    mean = task.initial_weights
    served = method.personalize(ModelPayload(mean), None, data, key)
    assert isinstance(served, ModelPredictor)

    def trained(examples: Examples) -> Tensor:
        hook = pull(mean, 0.3, 0.1, 0.01)
        return local_sgd(
            task, mean, examples, 0.1, key, num_epochs=3, gradient_hook=hook
        ).weights

    assert torch.equal(served.weights, trained(data.train_and_validation()))
    assert torch.equal(served.without_validation().weights, trained(data.train))
