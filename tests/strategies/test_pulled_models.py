"""Ditto, L2GD, MTL and pFedMe: models that a global one pulls, by hand."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.proximal import pull
from knnper.strategies.core.records import ModelPayload, ModelState
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.ditto import Ditto, DittoClientState, DittoSettings
from knnper.strategies.fed_mtl import FedMTL, FedMTLSettings
from knnper.strategies.l2gd import L2GD, L2GDSettings, L2GDState, coin_step, coins
from knnper.strategies.pfedme import PFedMe, PFedMeSettings
from tests.strategies.tiny import (
    KEY,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    updates,
    white,
)

RIGHT, WRONG = torch.tensor([3.0, -3.0]), torch.tensor([-3.0, 3.0])  # of label 0


def share(y: float) -> float:
    """Return σ(-2 y), minus the slope of the loss of label 0 in y at (y, -y)."""
    return float(torch.sigmoid(torch.tensor(-2 * y, dtype=torch.float64)))


def served(
    task: Task,
    settings: DittoSettings,
    memory: DittoClientState | None,
    data: ClientData,
    weights: torch.Tensor | None = None,
) -> ModelPredictor:
    payload = ModelPayload(task.initial_weights if weights is None else weights)
    method = Ditto(task, settings)
    return one_model_of(method, payload, memory, data, RandomKey(5))


def test_a_round_by_hand() -> None:
    task = linear_task(learning_rate=0.5, local_steps=2)
    method = Ditto(task, DittoSettings(prox_weights=(2.0, 0.0)))
    state, memory = run_rounds(method, {"a": white([0])}, num_rounds=1)
    # Models (y, -y) with slope -σ(-2 y). w: y = ¼, then ¼ + ½ σ(-½).
    expected = 0.25 + 0.5 * share(0.25)
    assert state.weights.tolist() == pytest.approx([expected, -expected])
    # v with λ = 2: y ← (y + ½ σ(-2 y) + 0) / (1 + 1), so ⅛ first. With λ = 0 as w.
    near = (0.125 + 0.5 * share(0.125)) / 2
    assert memory["a"].personal[0].tolist() == pytest.approx([near, -near])
    assert memory["a"].personal[1].tolist() == pytest.approx([expected, -expected])


def test_an_infinite_pull_keeps_the_model_that_was_sent() -> None:
    task = linear_task(batch_size=1, weight_decay=0.5)
    clients = {"a": white([0, 0, 1]), "b": white([1])}
    method = Ditto(task, DittoSettings(prox_weights=(1e30,)))
    sent, _ = run_rounds(of_name("fedavg", task), clients, num_rounds=2)
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
    models: tuple[torch.Tensor, ...], labels: list[int], expected: float
) -> None:
    task, settings = linear_task(), DittoSettings((0.1, 1.0, 4.0))
    data = white([1], labels)
    predictor = served(task, settings, DittoClientState(models), data)
    assert predictor.describe() == {"prox_weight": expected}
    assert torch.equal(predictor.weights, models[settings.prox_weights.index(expected)])
    assert predictor.without_validation() is predictor


def test_an_unseen_client_chooses_and_then_trains_on_both_splits() -> None:
    task = linear_task(batch_size=1, learning_rate=0.5)
    settings = DittoSettings((100.0, 0.01), unseen_epochs=4)
    data = white([1, 1, 1], [1, 1])

    def pulled(prox_weight: float, examples: Any) -> torch.Tensor:
        hook = pull(RIGHT, prox_weight, 0.5, 0.0)
        rng = RandomKey(5)
        return local_sgd(
            task, RIGHT, examples, 0.5, rng, num_epochs=4, gradient_hook=hook
        ).weights

    # The global model is wrong about all labels: only the weak pull lets it learn.
    predictor = served(task, settings, None, data, weights=RIGHT)
    assert predictor.describe() == {"prox_weight": 0.01}
    assert torch.equal(predictor.weights, pulled(0.01, data.train_and_validation()))
    alone = predictor.without_validation()
    assert torch.equal(alone.weights, pulled(0.01, data.train))
    assert alone.describe() == predictor.describe()


def test_an_unseen_client_without_validation_data_stays_near() -> None:
    task = linear_task(batch_size=1, learning_rate=0.5, weight_decay=0.1)
    predictor = served(
        task, DittoSettings((0.01, 1e30)), None, white([1]), weights=RIGHT
    )
    assert predictor.describe() == {"prox_weight": 1e30}
    torch.testing.assert_close(predictor.weights, RIGHT)


def test_two_rounds_by_hand() -> None:
    task = linear_task(learning_rate=0.5)
    method = FedMTL(task, FedMTLSettings(prox_weight=2.0))
    clients = {"a": white([0, 0, 0]), "b": white([1])}
    state, memory = run_rounds(method, clients, num_rounds=2)
    # Models (y, -y); η λ = 1, so y ← (y - ½ g + w̄) / 2. Round 1, all at 0 and g = ∓½:
    # y_a = ⅛, y_b = -⅛, w̄ = ¾ · ⅛ - ¼ · ⅛ = 1/16.
    # Round 2, g_a = -σ(-¼) and g_b = σ(-¼), each from its own y.
    pull_of = share(0.125)
    of_a = (0.125 + 0.5 * pull_of + 0.0625) / 2
    of_b = (-0.125 - 0.5 * pull_of + 0.0625) / 2
    assert memory["a"].weights.tolist() == pytest.approx([of_a, -of_a])
    assert memory["b"].weights.tolist() == pytest.approx([of_b, -of_b])
    mean = 0.75 * of_a + 0.25 * of_b
    assert state.weights.tolist() == pytest.approx([mean, -mean])


def test_an_unseen_client_trains_on_both_splits() -> None:
    task, data = (
        normed_task(num_rounds=2, batch_size=3, learning_rate=0.1, weight_decay=0.01),
        noisy(6, 4, seed=1),
    )
    method = FedMTL(task, FedMTLSettings(prox_weight=0.3, unseen_epochs=3))
    mean = task.initial_weights
    served = one_model_of(method, ModelPayload(mean), None, data)

    def trained(examples: Examples) -> Tensor:
        hook = pull(mean, 0.3, 0.1, 0.01)
        return local_sgd(
            task, mean, examples, 0.1, KEY, num_epochs=3, gradient_hook=hook
        ).weights

    assert torch.equal(served.weights, trained(data.train_and_validation()))
    assert torch.equal(served.without_validation().weights, trained(data.train))


def test_tails_heads_tails_by_hand() -> None:
    task = linear_task(local_steps=3)
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


def test_weight_decay_is_a_part_of_the_loss() -> None:
    task = linear_task(local_steps=2, weight_decay=0.5)
    settings = L2GDSettings(prox_weight=0.3, aggregation_probability=0.2)
    step = coin_step(torch.tensor([1.0, -1.0]), iter([False, True]), settings)
    start, examples = torch.tensor([2.0, -2.0]), white([0]).train
    result = local_sgd(task, start, examples, 0.4, RandomKey(1), local_step=step)
    # Tails: 0.4 / 0.8 = ½ along -σ(-4) + ½ · 2. Heads, s = 0.6, have no decay.
    first = 2 + 0.5 * (share(2) - 1)
    second = (first + 0.6) / 1.6
    assert result.weights.tolist() == pytest.approx([second, -second])


def test_one_step_a_round_is_the_algorithm() -> None:
    task = linear_task(learning_rate=0.5)
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


def test_the_mean_weighs_clients_by_their_examples() -> None:
    method = L2GD(linear_task(), L2GDSettings())
    sent = updates([1.0, -1.0], [5.0, 3.0], examples=[3, 1])
    state = method.aggregate(L2GDState(torch.zeros(2), seed=1), iter(sent))
    assert state.weights.tolist() == [2.0, 0.0]


def test_the_seed_comes_from_the_run_and_stays() -> None:
    method = L2GD(linear_task(), L2GDSettings())
    state, _ = run_rounds(method, {"a": white([0])}, num_rounds=2)
    first = method.init(("a",), RandomKey(11).child("init"))
    assert state.seed == first.seed != method.init(("a",), RandomKey(12)).seed


def test_two_inner_steps_by_hand() -> None:
    task = linear_task(learning_rate=0.25)
    settings = PFedMeSettings(prox_weight=2.0, inner_steps=2, inner_learning_rate=0.25)
    state, _ = run_rounds(PFedMe(task, settings), {"a": white([0])}, 1)
    # From w = 0: θ ← 0 + ¼ · ½ = ⅛, then θ ← ⅛ - ¼ (-σ(-¼) + 2 · (⅛ - 0)).
    personal = 0.125 - 0.25 * (-share(0.125) + 2 * 0.125)
    # w ← 0 - η λ (0 - θ) = ¼ · 2 θ.
    assert state.weights.tolist() == pytest.approx([personal / 2, -personal / 2])


def test_every_local_step_starts_from_its_own_model() -> None:
    task = linear_task(learning_rate=0.25, local_steps=2)
    settings = PFedMeSettings(prox_weight=2.0, inner_steps=1, inner_learning_rate=0.25)
    state, _ = run_rounds(PFedMe(task, settings), {"a": white([0])}, 1)
    # K = 1: θ = w + ¼ σ(-2 w), so w ← w + η λ (θ - w) = w + ⅛ σ(-2 w), twice.
    before = 0.125 * 0.5
    after = before + 0.125 * share(before)
    assert state.weights.tolist() == pytest.approx([after, -after])


def test_the_server_steps_beyond_the_mean_but_for_buffers() -> None:
    task = normed_task()
    parameters = slice(0, task.model.num_parameters)
    method = PFedMe(task, PFedMeSettings(server_learning_rate=2.0))
    unit_weights = torch.ones_like(task.initial_weights)
    sent = updates(
        (3 * unit_weights).tolist(), (7 * unit_weights).tolist(), examples=[3, 1]
    )
    state = method.aggregate(ModelState(unit_weights), iter(sent))
    # The mean is (3 · 3 + 7) / 4 = 4, and 1 + 2 (4 - 1) = 7.
    assert set(state.weights[parameters].tolist()) == {7.0}
    assert set(state.weights[parameters.stop :].tolist()) == {4.0}


@pytest.mark.parametrize(
    ("prox_weight", "step"), [(0.0, 0.5), (2.0, 0.25), (1e30, 0.0)]
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_client_finds_its_model_near_the_global_one(
    prox_weight: float, step: float, weight_decay: float
) -> None:
    settings = PFedMeSettings(prox_weight, inner_learning_rate=0.5, personal_epochs=1)
    task = linear_task(weight_decay=weight_decay)
    method = PFedMe(task, settings)
    payload = ModelPayload(torch.tensor([1.0, -1.0]))
    served = one_model_of(method, payload, None, white([0]))
    # One step from w: θ = w + α (σ(-2 w) - d w) / (1 + α λ).
    expected = 1 + step * (share(1) - weight_decay)
    assert served.weights.tolist() == pytest.approx([expected, -expected])


def test_a_client_finds_its_model_without_momentum() -> None:
    settings = PFedMeSettings(2.0, inner_learning_rate=0.5, personal_epochs=2)
    method = PFedMe(linear_task(momentum=0.9), settings)
    payload = ModelPayload(torch.tensor([1.0, -1.0]))
    served = one_model_of(method, payload, None, white([0]))
    # θ ← (θ + ½ σ(-2 θ) + ½ · 2 · w) / (1 + ½ · 2), twice, from θ = w = 1.
    first = (1 + 0.5 * share(1) + 1) / 2
    second = (first + 0.5 * share(first) + 1) / 2
    assert served.weights.tolist() == pytest.approx([second, -second])


def test_coins_are_those_of_the_round() -> None:
    def thrown(server_round: int, probability: float = 0.3) -> list[bool]:
        return list(itertools.islice(coins(7, server_round, probability), 2000))

    assert thrown(1) == thrown(1)
    assert thrown(1) != thrown(2)
    # The standard deviation of the share is √(0.3 · 0.7 / 2000) ≈ 0.01.
    assert sum(thrown(1)) / 2000 == pytest.approx(0.3, abs=0.04)
    assert not any(thrown(1, probability=0.0))
