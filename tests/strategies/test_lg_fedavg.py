import pytest
import torch

from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.lg_fedavg import LGFedAvg, LGFedAvgSettings
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds
from tests.strategies.two_weights import one_model_of, two_weights_task

SIGMA_2 = 0.11920292  # σ(-2)
HALF = TrainingSettings(learning_rate=0.5)
TRAINING = TrainingSettings(num_rounds=3, batch_size=3, learning_rate=0.1)


def test_first_round_by_hand(white: MakeClient, run_rounds: RunRounds) -> None:
    method = LGFedAvg(two_weights_task(HALF, a=1, b=1), LGFedAvgSettings())
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # Logits (ab, -ab): with label 0 a and b end at 1 + σ(-2), with label 1 at σ(-2).
    # The head b is averaged, ¾ (1 + σ(-2)) + ¼ σ(-2); the server's a stays.
    assert state.weights.tolist() == pytest.approx([1, 0.75 + SIGMA_2], abs=1e-6)
    assert memory["a"].personal.tolist() == pytest.approx([1 + SIGMA_2], abs=1e-6)
    assert memory["b"].personal.tolist() == pytest.approx([SIGMA_2], abs=1e-6)


def test_everyone_is_served_a_representation_of_its_own(
    white: MakeClient, run_rounds: RunRounds, key: RandomKey
) -> None:
    method = LGFedAvg(
        two_weights_task(HALF, a=1, b=1), LGFedAvgSettings(unseen_epochs=1)
    )
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    payload = method.broadcast(state, "b", key)
    seen = one_model_of(method, payload, memory["b"], clients["b"], key)
    expected = [SIGMA_2, 0.75 + SIGMA_2]
    assert seen.weights.tolist() == pytest.approx(expected, abs=1e-6)
    unseen = one_model_of(method, ModelPayload(torch.ones(2)), None, white([0]), key)
    # An unseen client starts from the server's a, under the head b, which stays.
    assert unseen.weights.tolist() == pytest.approx([1 + SIGMA_2, 1], abs=1e-6)


def test_only_the_head_moves_at_the_server(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TRAINING)
    clients = {name: noisy(5, 0, seed=i) for i, name in enumerate("ab")}
    method = LGFedAvg(task, LGFedAvgSettings())
    state, memory = run_rounds(method, clients, num_rounds=2)
    head, initial = task.head_mask, task.initial_weights
    assert torch.equal(state.weights != initial, head)
    for name in "ab":
        assert len(memory[name].personal) == int((~head).sum())
        assert not torch.equal(memory[name].personal, initial[~head])


def test_the_body_is_the_default_of_the_local_layers(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TRAINING)
    clients = {name: noisy(5, 0, seed=i) for i, name in enumerate("ab")}
    by_default, _ = run_rounds(LGFedAvg(task, LGFedAvgSettings()), clients, 2)
    counted, _ = run_rounds(LGFedAvg(task, LGFedAvgSettings(1)), clients, 2)
    assert torch.equal(counted.weights, by_default.weights)


def test_without_local_layers_it_is_fedavg(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds, key: RandomKey
) -> None:
    task = normed_task(TRAINING)
    clients = {name: noisy(5 + i, 2, seed=i) for i, name in enumerate("abc")}
    everything_shared = LGFedAvg(task, LGFedAvgSettings(num_local_layers=0))
    expected, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=3)
    found, memory = run_rounds(everything_shared, clients, num_rounds=3)
    assert torch.equal(found.weights, expected.weights)
    payload = ModelPayload(found.weights)
    for part in (None, memory["a"]):
        served = one_model_of(everything_shared, payload, part, clients["a"], key)
        assert torch.equal(served.weights, expected.weights)


def test_some_layer_must_be_global(normed_task: MakeTask) -> None:
    with pytest.raises(ConfigError) as caught:
        LGFedAvg(normed_task(TRAINING), LGFedAvgSettings(num_local_layers=5))
    (problem,) = caught.value.problems
    assert problem.place == "method.num_local_layers"
    assert "found 5, expected at most 1: of the model's 2 layers" in problem.message
