import itertools

import pytest
import torch
from torch import Tensor

from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.loading import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fed_mtl import FedMTL, FedMTLSettings
from knnper.strategies.l2gd import L2GD, L2GDSettings, L2GDState, coin_step, coins
from knnper.strategies.local import Local, LocalSettings
from tests.strategies.method_checks import trained_with_the_keys_of_local
from tests.strategies.small_updates import updates
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds


def share(y: float) -> float:
    """Return σ(-2 y), minus the slope of the loss of label 0 in y at (y, -y)."""
    return float(torch.sigmoid(torch.tensor(-2 * y, dtype=torch.float64)))


def test_tails_heads_tails_by_hand(linear_task: MakeTask, white: MakeClient) -> None:
    task = linear_task(TrainingSettings(local_steps=3))
    settings = L2GDSettings(prox_weight=0.3, aggregation_probability=0.2)
    mean, heads = torch.tensor([1.0, -1.0]), iter([False, True, False])
    step = coin_step(mean, heads, settings)
    result = local_sgd(
        task, torch.zeros(2), white([0]).train, 0.4, RandomKey(1), local_step=step
    )
    # Tails steps with 0.4 / 0.8 = ½; at heads s = 0.4 · 0.3 / 0.2 = 0.6.
    first = 0.5 * 0.5
    second = (first + 0.6 * 1.0) / 1.6
    third = second + 0.5 * share(second)
    assert result.weights.tolist() == pytest.approx([third, -third])
    losses = [-torch.tensor(1 - share(y)).log() for y in (0.0, first, second)]
    assert result.train_loss == pytest.approx(float(sum(losses)) / 3)


def test_weight_decay_is_a_part_of_the_loss(
    linear_task: MakeTask, white: MakeClient
) -> None:
    task = linear_task(TrainingSettings(local_steps=2, weight_decay=0.5))
    settings = L2GDSettings(prox_weight=0.3, aggregation_probability=0.2)
    step = coin_step(torch.tensor([1.0, -1.0]), iter([False, True]), settings)
    start, examples = torch.tensor([2.0, -2.0]), white([0]).train
    result = local_sgd(task, start, examples, 0.4, RandomKey(1), local_step=step)
    # Tails: 0.4 / 0.8 = ½ along -σ(-4) + ½ · 2. Heads, s = 0.6, have no decay.
    first = 2 + 0.5 * (share(2) - 1)
    second = (first + 0.6) / 1.6
    assert result.weights.tolist() == pytest.approx([second, -second])


def test_one_step_a_round_is_the_algorithm(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(learning_rate=0.5))
    settings = L2GDSettings(prox_weight=0.4, aggregation_probability=0.4)
    clients = {"a": white([0, 0]), "b": white([1, 1])}
    method, num_rounds = L2GD(task, settings), 12
    state, memory = run_rounds(method, clients, num_rounds)

    of_a, of_b, seen = 0.0, 0.0, set()
    for server_round in range(1, num_rounds + 1):
        heads = next(coins(state.seed, server_round, 0.4))
        seen.add(heads)
        if heads:  # s = ½ · 0.4 / 0.4 = ½
            mean = (of_a + of_b) / 2
            of_a, of_b = (of_a + mean / 2) / 1.5, (of_b + mean / 2) / 1.5
        else:
            rate = 0.5 / 0.6
            of_a, of_b = of_a + rate * share(of_a), of_b - rate * share(-of_b)
    assert seen == {True, False}
    assert memory["a"].weights.tolist() == pytest.approx([of_a, -of_a], abs=1e-5)
    assert memory["b"].weights.tolist() == pytest.approx([of_b, -of_b], abs=1e-5)
    assert float(state.weights[0]) == pytest.approx((of_a + of_b) / 2, abs=1e-5)


def test_the_mean_weighs_clients_by_their_examples(linear_task: MakeTask) -> None:
    method = L2GD(linear_task(TrainingSettings()), L2GDSettings())
    sent = updates([1.0, -1.0], [5.0, 3.0], examples=[3, 1])
    state = method.aggregate(L2GDState(torch.zeros(2), seed=1), iter(sent))
    assert state.weights.tolist() == [2.0, 0.0]


def test_coins_are_those_of_the_round() -> None:
    def thrown(server_round: int, probability: float = 0.3) -> list[bool]:
        return list(itertools.islice(coins(7, server_round, probability), 2000))

    assert thrown(1) == thrown(1)
    assert thrown(1) != thrown(2)
    # The standard deviation of the share is √(0.3 · 0.7 / 2000) ≈ 0.01.
    assert sum(thrown(1)) / 2000 == pytest.approx(0.3, abs=0.04)
    assert not any(thrown(1, probability=0.0))


def test_all_clients_throw_the_same_coins(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings())
    method = L2GD(task, L2GDSettings(1.0, aggregation_probability=0.5))
    moved = set()
    for server_round in range(1, 9):
        payload = L2GDState(torch.zeros(2), seed=3)
        changed = [
            bool(
                method.client_update(
                    payload, None, white(labels), server_round, key.child(name)
                )[1]
                .weights.abs()
                .max()
                > 0
            )
            for name, labels in [("a", [0]), ("b", [1]), ("c", [0, 0, 0])]
        ]
        assert len(set(changed)) == 1  # at the mean, heads leave a model where it is
        moved.add(changed[0])
    assert moved == {True, False}


def test_without_heads_it_is_local(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    training = TrainingSettings(
        num_rounds=4, batch_size=3, momentum=0.5, weight_decay=0.01
    )
    task = normed_task(training)
    clients = {"a": noisy(7, 2, seed=1), "b": noisy(4, 2, seed=2)}
    never = L2GDSettings(prox_weight=5.0, aggregation_probability=0.0)
    often = L2GDSettings(prox_weight=5.0, aggregation_probability=0.6)
    alone = trained_with_the_keys_of_local(L2GD(task, never), task, clients, key)
    mixed = trained_with_the_keys_of_local(L2GD(task, often), task, clients, key)
    for name, data in clients.items():
        payload = ModelPayload(task.initial_weights)
        predictor = Local(task, LocalSettings()).personalize(payload, None, data, key)
        assert isinstance(predictor, ModelPredictor)
        served = predictor.without_validation()
        assert torch.equal(alone[name], served.weights)
        assert not torch.equal(mixed[name], served.weights)


def test_an_infinite_pull_steps_onto_the_mean(
    linear_task: MakeTask, white: MakeClient
) -> None:
    task, mean = linear_task(TrainingSettings()), torch.tensor([2.0, 1.0])
    step = coin_step(mean, iter([True]), L2GDSettings(prox_weight=1e30))
    result = local_sgd(
        task, torch.zeros(2), white([0]).train, 0.4, RandomKey(1), local_step=step
    )
    assert torch.equal(result.weights, mean)


def test_steps_to_the_mean_leave_buffers_alone(
    normed_task: MakeTask, noisy: MakeClient
) -> None:
    task, data = normed_task(TrainingSettings(batch_size=6)), noisy(6, 0, seed=1)
    num_parameters = task.model.num_parameters

    def buffers(mean: Tensor) -> Tensor:
        step = coin_step(mean[:num_parameters], iter([True]), L2GDSettings())
        start, rng = task.initial_weights, RandomKey(1)
        result = local_sgd(task, start, data.train, 0.4, rng, local_step=step)
        return result.weights[num_parameters:]

    other = task.initial_weights + 1
    assert torch.equal(buffers(task.initial_weights), buffers(other))


def test_the_seed_comes_from_the_run_and_stays(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    method = L2GD(linear_task(TrainingSettings()), L2GDSettings())
    state, _ = run_rounds(method, {"a": white([0])}, num_rounds=2)
    first = method.init(("a",), RandomKey(11).child("init"))
    assert state.seed == first.seed != method.init(("a",), RandomKey(12)).seed


def test_clients_are_served_as_by_fed_mtl(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task, data = normed_task(TrainingSettings(num_rounds=2)), noisy(6, 4, seed=1)
    method = L2GD(task, L2GDSettings(prox_weight=0.7, unseen_epochs=2))
    alike = FedMTL(task, FedMTLSettings(prox_weight=0.7, unseen_epochs=2))
    payload = L2GDState(task.initial_weights, seed=1)
    own = ModelState(task.initial_weights + 1)
    for memory in (None, own):
        found = method.personalize(payload, memory, data, key)
        sent = ModelPayload(payload.weights)
        expected = alike.personalize(sent, memory, data, key)
        assert isinstance(found, ModelPredictor)
        assert isinstance(expected, ModelPredictor)
        assert torch.equal(found.weights, expected.weights)
        assert torch.equal(found.weights, own.weights) == (memory is own)
        alone = expected.without_validation().weights
        assert torch.equal(found.without_validation().weights, alone)


def test_a_coin_that_is_always_heads_is_refused() -> None:
    document = {
        "name": "test",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "l2gd", "aggregation_probability": 1.0},
    }
    with pytest.raises(ConfigError, match=r"aggregation_probability.*less than 1"):
        load_experiment(document, experiment_catalogue())
