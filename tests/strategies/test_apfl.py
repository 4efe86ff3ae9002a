"""APFL: by hand, at both ends of α, and with an α that is learned."""

from typing import Any

import pytest
import torch
from torch import nn

from knnper.data.examples import ClientData
from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.loading import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.apfl import Apfl, ApflClientState, ApflSettings, mixed
from knnper.strategies.core.method import UNSEEN_CLIENT, Method, NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.local import Local, LocalSettings
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds

SIGMA_1 = 0.7310586  # σ(1), p(0) where the logits are (½, -½)
SIGMA_34 = 0.6791787  # σ(¾), p(0) where the logits are (⅜, -⅜)

EVERYTHING = TrainingSettings(
    batch_size=3, learning_rate=0.1, momentum=0.9, weight_decay=0.01, num_rounds=3
)


def with_dropout(task: Task) -> Task:
    """Let the model draw random numbers in training."""
    features = task.model.module.features
    assert isinstance(features, nn.Sequential)
    features.append(nn.Dropout(0.5))
    return task


def served(method: Method, state: Any, memory: Any, data: ClientData) -> ModelPredictor:
    payload = method.broadcast(state, UNSEEN_CLIENT, RandomKey(5))
    predictor = method.personalize(payload, memory, data, RandomKey(6))
    assert isinstance(predictor, ModelPredictor)
    return predictor


def test_two_rounds_by_hand(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(learning_rate=1.0))
    method = Apfl(task, ApflSettings(mixing_weight=0.5))
    clients = {"a": white([0])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # At v = w = 0 the gradient is (-½, ½): w steps by ½, v by α times that.
    assert state.weights.tolist() == [0.5, -0.5]
    assert memory["a"].personal.tolist() == [0.25, -0.25]
    # Served: ½ · ¼ + ½ · ½.
    assert served(method, state, memory["a"], clients["a"]).weights[0] == 0.375

    state, memory = run_rounds(method, clients, num_rounds=2)
    # w ← ½ + (1 - σ(1)); v̄ = ⅜, so v ← ¼ + ½ (1 - σ(¾)).
    assert float(state.weights[0]) == pytest.approx(0.5 + 1 - SIGMA_1, abs=1e-6)
    expected = 0.25 + 0.5 * (1 - SIGMA_34)
    assert float(memory["a"].personal[0]) == pytest.approx(expected, abs=1e-6)
    assert memory["a"].mixing_weight == 0.5


def test_the_mixing_weight_follows_its_gradient(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(learning_rate=1.0))
    method = Apfl(task, ApflSettings(mixing_weight=0.5, adaptive=True))
    _, memory = run_rounds(method, {"a": white([0])}, num_rounds=1)
    assert memory["a"].mixing_weight == 0.5  # v - w was 0
    _, memory = run_rounds(method, {"a": white([0])}, num_rounds=2)
    # v - w = (-¼, ¼) and ∇f(v̄) = (σ(¾) - 1, 1 - σ(¾)): their product is
    # ½ (1 - σ(¾)), and the rate is 1.
    expected = 0.5 - 0.5 * (1 - SIGMA_34)
    assert memory["a"].mixing_weight == pytest.approx(expected, abs=1e-6)
    # v steps by the α from before the step, ½: v ← ¼ + ½ (1 - σ(¾)).
    own = 0.25 + 0.5 * (1 - SIGMA_34)
    assert float(memory["a"].personal[0]) == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize(("personal", "expected"), [(9.0, 1.0), (-9.0, 0.0)])
def test_the_mixing_weight_stays_in_the_unit_interval(
    personal: float, expected: float, linear_task: MakeTask, white: MakeClient
) -> None:
    task = linear_task(TrainingSettings(learning_rate=50.0))
    method = Apfl(task, ApflSettings(adaptive=True))
    start = ApflClientState(torch.tensor([personal, -personal]), 0.001)
    # Label 0 pulls to where v - w points, or away from it.
    after, _ = method.client_update(
        ModelPayload(torch.zeros(2)), start, white([0]), 1, RandomKey(1)
    )
    assert after.mixing_weight == expected


@pytest.mark.parametrize("mixing_weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_global_model_is_fedavgs(
    mixing_weight: float,
    adaptive: bool,
    normed_task: MakeTask,
    noisy: MakeClient,
    run_rounds: RunRounds,
) -> None:
    task = with_dropout(normed_task(EVERYTHING))
    clients = {name: noisy(7 + i, 0, seed=i) for i, name in enumerate("abc")}
    expected, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=3)
    method = Apfl(task, ApflSettings(mixing_weight, adaptive))
    found, memory = run_rounds(method, clients, num_rounds=3)
    assert torch.equal(found.weights, expected.weights)
    if mixing_weight == 0.0 and not adaptive:
        weights = served(method, found, memory["a"], clients["a"]).weights
        assert torch.equal(weights, expected.weights)


def test_a_personal_model_alone_is_local(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task, data = with_dropout(normed_task(EVERYTHING)), noisy(8, 0, seed=1)
    payload = ModelPayload(task.initial_weights)
    alone = Local(task, LocalSettings()).personalize(payload, None, data, key)
    method = Apfl(task, ApflSettings(mixing_weight=1.0))
    memory = None
    for server_round in (1, 2, 3):
        rng = key.child("round", server_round)  # as Local draws its mini-batches
        memory, _ = method.client_update(payload, memory, data, server_round, rng)
        payload = ModelPayload(task.fresh_weights(rng))  # other clients' doing
    assert isinstance(alone, ModelPredictor)
    assert memory is not None
    assert torch.equal(memory.personal, alone.weights)
    predictor = method.personalize(payload, memory, data, key)
    assert isinstance(predictor, ModelPredictor)
    assert torch.equal(predictor.weights, alone.weights)


class TestBuffers:
    """Those that are served were collected at the parameters that are."""

    def after_a_round(
        self, task: Task, noisy: MakeClient, run_rounds: RunRounds, mixing_weight: float
    ) -> tuple[ModelPredictor, torch.Tensor, torch.Tensor]:
        """Return what client a serves, the global model and its personal one."""
        clients = {name: noisy(9, 0, seed=i) for i, name in enumerate("ab")}
        method = Apfl(task, ApflSettings(mixing_weight))
        state, memory = run_rounds(method, clients, num_rounds=2)
        found = served(method, state, memory["a"], clients["a"])
        return found, state.weights, memory["a"].personal

    @pytest.mark.parametrize("mixing_weight", [0.1, 0.9, 1.0])
    def test_they_are_those_of_the_mixed_model(
        self,
        mixing_weight: float,
        normed_task: MakeTask,
        noisy: MakeClient,
        run_rounds: RunRounds,
    ) -> None:
        task = normed_task(EVERYTHING)
        ends = self.after_a_round(task, noisy, run_rounds, mixing_weight)
        found, shared, own = ends
        cut = task.model.num_parameters
        assert not torch.equal(own[cut:], shared[cut:])
        assert torch.equal(found.weights[cut:], own[cut:])
        expected = mixed(shared[:cut], own[:cut], mixing_weight)
        assert torch.equal(found.weights[:cut], expected)

    def test_without_a_personal_part_they_are_the_global_models(
        self, normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
    ) -> None:
        task = normed_task(EVERYTHING)
        found, shared, own = self.after_a_round(task, noisy, run_rounds, 0.0)
        assert torch.equal(found.weights, shared)
        assert not torch.equal(own, shared)


class TestUnseenClients:
    def test_the_shared_model_is_fixed(
        self, linear_task: MakeTask, white: MakeClient
    ) -> None:
        task = linear_task(TrainingSettings(learning_rate=1.0))
        method = Apfl(task, ApflSettings(mixing_weight=0.5, unseen_epochs=1))
        state = method.init(("a",), RandomKey(1))
        predictor = served(method, state, None, white([0]))
        # v = ½ · ½, and v̄ = ½ v + ½ · 0.
        assert predictor.weights.tolist() == [0.125, -0.125]
        assert predictor.describe() == {"mixing_weight": 0.5}

    @pytest.mark.parametrize("mixing_weight", [0.0, 1.0])
    def test_both_ends(
        self, mixing_weight: float, normed_task: MakeTask, noisy: MakeClient
    ) -> None:
        task, data = normed_task(EVERYTHING), noisy(8, 3, seed=1)
        settings = ApflSettings(mixing_weight, unseen_epochs=2)
        method = Apfl(task, settings)
        start = task.initial_weights
        found = served(method, method.init(("a",), RandomKey(1)), None, data).weights
        both, rng = data.train_and_validation(), RandomKey(6)
        tuned = local_sgd(task, start, both, 0.1, rng, num_epochs=2)
        assert torch.equal(found, tuned.weights if mixing_weight else start)

    def test_without_the_validation_split(
        self, normed_task: MakeTask, noisy: MakeClient
    ) -> None:
        task, data = normed_task(EVERYTHING), noisy(8, 3, seed=1)
        method = Apfl(task, ApflSettings(0.5, adaptive=True, unseen_epochs=2))
        state = method.init(("a",), RandomKey(1))
        found = served(method, state, None, data)
        alone = found.without_validation()
        expected = served(method, state, None, noisy(8, 0, seed=1))
        assert torch.equal(alone.weights, expected.weights)
        assert alone.describe() == expected.describe() != found.describe()

    def test_without_data_it_is_the_global_model_whatever_is_remembered(
        self, normed_task: MakeTask, noisy: MakeClient
    ) -> None:
        task = normed_task(EVERYTHING)
        method = Apfl(task, ApflSettings(0.3))
        state = method.init(("a",), RandomKey(1))
        memory = ApflClientState(torch.ones_like(state.weights), 0.3)
        found = served(method, state, memory, noisy(0, 0, seed=1)).weights
        assert torch.equal(found, state.weights)


def test_the_mixture_is_exact_where_it_must_be() -> None:
    one, other = torch.tensor([0.1, 1e-8, 3e7]), torch.tensor([0.3, 1.0, -3e7])
    assert torch.equal(mixed(one, other, 0.0), one)
    assert torch.equal(mixed(one, other, 1.0), other)
    for share in (0.1, 0.3, 0.7, 0.9):
        assert torch.equal(mixed(one, one, share), one)
    torch.testing.assert_close(mixed(one, other, 0.25), 0.75 * one + 0.25 * other)


def test_a_mixing_weight_out_of_range_is_refused() -> None:
    document = {
        "name": "mixed",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "apfl", "mixing_weight": 1.5, "unseen_epochs": 0},
    }
    with pytest.raises(ConfigError) as caught:
        load_experiment(document, experiment_catalogue())
    places = {problem.place for problem in caught.value.problems}
    assert places == {"method.mixing_weight", "method.unseen_epochs"}
