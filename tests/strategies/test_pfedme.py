import pytest
import torch

from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload, ModelState, ModelUpdate
from knnper.strategies.fedavg import FedAvg
from knnper.strategies.pfedme import PFedMe, PFedMeSettings
from tests.strategies.method_checks import problems_of
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds


def share(y: float) -> float:
    """Return σ(-2 y), minus the slope of the loss of label 0 in y at (y, -y)."""
    return float(torch.sigmoid(torch.tensor(-2 * y, dtype=torch.float64)))


def test_two_inner_steps_by_hand(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(learning_rate=0.25))
    settings = PFedMeSettings(prox_weight=2.0, inner_steps=2, inner_learning_rate=0.25)
    state, _ = run_rounds(PFedMe(task, settings), {"a": white([0])}, 1)
    # From w = 0: θ ← 0 + ¼ · ½ = ⅛, then θ ← ⅛ - ¼ (-σ(-¼) + 2 · (⅛ - 0)).
    personal = 0.125 - 0.25 * (-share(0.125) + 2 * 0.125)
    # w ← 0 - η λ (0 - θ) = ¼ · 2 θ.
    assert state.weights.tolist() == pytest.approx([personal / 2, -personal / 2])


def test_every_local_step_starts_from_its_own_model(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(learning_rate=0.25, local_steps=2))
    settings = PFedMeSettings(prox_weight=2.0, inner_steps=1, inner_learning_rate=0.25)
    state, _ = run_rounds(PFedMe(task, settings), {"a": white([0])}, 1)
    # K = 1: θ = w + ¼ σ(-2 w), so w ← w + η λ (θ - w) = w + ⅛ σ(-2 w), twice.
    before = 0.125 * 0.5
    after = before + 0.125 * share(before)
    assert state.weights.tolist() == pytest.approx([after, -after])


def test_one_inner_step_of_rate_one_over_lambda_is_fedavg(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    training = TrainingSettings(
        batch_size=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01
    )
    task = normed_task(training)
    clients = {name: noisy(5 + i, 0, seed=i) for i, name in enumerate("abc")}
    expected, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=3)
    one = PFedMeSettings(prox_weight=15, inner_steps=1, inner_learning_rate=1 / 15)
    found, _ = run_rounds(PFedMe(task, one), clients, num_rounds=3)
    assert torch.equal(found.weights, expected.weights)
    more, _ = run_rounds(PFedMe(task, PFedMeSettings()), clients, num_rounds=3)
    assert not torch.equal(more.weights, expected.weights)


def test_an_infinite_pull_is_fedavg(
    linear_task: MakeTask, white: MakeClient, run_rounds: RunRounds
) -> None:
    task = linear_task(TrainingSettings(batch_size=1, learning_rate=0.1))
    clients = {"a": white([0, 0, 1]), "b": white([1])}
    expected, _ = run_rounds(FedAvg(task, NoSettings()), clients, num_rounds=3)
    near = PFedMeSettings(2.0**100, inner_steps=4, inner_learning_rate=2.0**-100)
    found, _ = run_rounds(PFedMe(task, near), clients, num_rounds=3)
    assert torch.equal(found.weights, expected.weights)


def test_without_a_pull_the_global_model_stays(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TrainingSettings(batch_size=3))
    clients = {"a": noisy(6, 0, seed=1), "b": noisy(4, 0, seed=2)}
    method = PFedMe(task, PFedMeSettings(prox_weight=0.0))
    state, _ = run_rounds(method, clients, num_rounds=2)
    parameters = slice(0, task.model.num_parameters)
    assert torch.equal(state.weights[parameters], task.initial_weights[parameters])


def test_without_a_pull_weight_decay_alone_moves_the_global_model(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TrainingSettings(learning_rate=0.1, weight_decay=0.5))
    method = PFedMe(task, PFedMeSettings(prox_weight=0.0))
    state, _ = run_rounds(method, {"a": noisy(6, 0, seed=1)}, num_rounds=2)
    parameters = slice(0, task.model.num_parameters)
    expected = (1 - 0.1 * 0.5) ** 2 * task.initial_weights[parameters]
    torch.testing.assert_close(state.weights[parameters], expected)
    buffers = slice(parameters.stop, None)
    assert not torch.equal(state.weights[buffers], task.initial_weights[buffers])


def test_the_server_steps_beyond_the_mean_but_for_buffers(
    normed_task: MakeTask,
) -> None:
    task = normed_task(TrainingSettings())
    parameters = slice(0, task.model.num_parameters)
    method = PFedMe(task, PFedMeSettings(server_learning_rate=2.0))
    ones = torch.ones_like(task.initial_weights)
    updates = [
        ("a", ModelUpdate(3 * ones, 3, 0.5)),
        ("b", ModelUpdate(7 * ones, 1, 0.5)),
    ]
    state = method.aggregate(ModelState(ones), iter(updates))
    # The mean is (3 · 3 + 7) / 4 = 4, and 1 + 2 (4 - 1) = 7.
    assert set(state.weights[parameters].tolist()) == {7.0}
    assert set(state.weights[parameters.stop :].tolist()) == {4.0}


@pytest.mark.parametrize(
    ("prox_weight", "step"), [(0.0, 0.5), (2.0, 0.25), (1e30, 0.0)]
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_client_finds_its_model_near_the_global_one(
    prox_weight: float,
    step: float,
    weight_decay: float,
    linear_task: MakeTask,
    white: MakeClient,
    key: RandomKey,
) -> None:
    settings = PFedMeSettings(prox_weight, inner_learning_rate=0.5, personal_epochs=1)
    task = linear_task(TrainingSettings(weight_decay=weight_decay))
    method = PFedMe(task, settings)
    payload = ModelPayload(torch.tensor([1.0, -1.0]))
    served = method.personalize(payload, None, white([0]), key)
    assert isinstance(served, ModelPredictor)
    # One step from w: θ = w + α (σ(-2 w) - d w) / (1 + α λ).
    expected = 1 + step * (share(1) - weight_decay)
    assert served.weights.tolist() == pytest.approx([expected, -expected])
    assert not method.serves_global_model
    assert not method.personalizes_by_inference


def test_a_client_finds_its_model_without_momentum(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    settings = PFedMeSettings(2.0, inner_learning_rate=0.5, personal_epochs=2)
    method = PFedMe(linear_task(TrainingSettings(momentum=0.9)), settings)
    payload = ModelPayload(torch.tensor([1.0, -1.0]))
    served = method.personalize(payload, None, white([0]), key)
    assert isinstance(served, ModelPredictor)
    # θ ← (θ + ½ σ(-2 θ) + ½ · 2 · w) / (1 + ½ · 2), twice, from θ = w = 1.
    first = (1 + 0.5 * share(1) + 1) / 2
    second = (first + 0.5 * share(first) + 1) / 2
    assert served.weights.tolist() == pytest.approx([second, -second])


def test_clients_are_served_alike_whether_they_were_seen_or_not(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task, data = normed_task(TrainingSettings(batch_size=3)), noisy(6, 4, seed=1)
    method = PFedMe(task, PFedMeSettings())
    payload = ModelPayload(task.initial_weights)
    memory, _ = method.client_update(payload, None, data, 1, key)
    seen, unseen = (
        method.personalize(payload, state, data, key) for state in (memory, None)
    )
    assert isinstance(seen, ModelPredictor)
    assert isinstance(unseen, ModelPredictor)
    assert torch.equal(seen.weights, unseen.weights)
    assert not torch.equal(seen.weights, payload.weights)


def test_inner_steps_that_diverge_are_refused() -> None:
    steep = PFedMeSettings(prox_weight=20.0, inner_learning_rate=0.2)
    (problem,) = problems_of(PFedMe, steep)
    assert problem.place == "method.inner_learning_rate"
    assert "found 0.2 with prox_weight 20.0, expected less than" in problem.message
    assert "2 / prox_weight = 0.1" in problem.message
    assert problems_of(PFedMe, PFedMeSettings()) == ()
    assert problems_of(PFedMe, PFedMeSettings(prox_weight=0.0)) == ()
