import pytest
import torch
from torch import nn

from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.models.networks import TolerantBatchNorm2d
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.fedbn import BATCH_NORMS, FedBN, FedBNSettings
from tests.strategies.trained_methods import MakeClient, MakeTask, RunRounds
from tests.strategies.two_weights import one_model_of, task_on_one_feature

SIGMA_1 = 0.26894142  # σ(-1)
HALF = TrainingSettings(learning_rate=0.5)


def normed_pixel(unseen_epochs: int = 20) -> Method:
    """Return FedBN where z = γ x̂ + β; weights (γ, β, b, running mean, variance)."""
    task = task_on_one_feature(nn.BatchNorm1d(1), HALF, 1, 0, 1, 0, 1)
    return FedBN(task, FedBNSettings(unseen_epochs))


def test_two_rounds_by_hand(white: MakeClient, run_rounds: RunRounds) -> None:
    clients = {"a": white([0, 0]), "b": white([1, 1])}
    state, memory = run_rounds(normed_pixel(), clients, num_rounds=1)
    # Equal pixels: x̂ = 0, so z = β, the gradients of γ and b are 0, and that of β is
    # ±2b σ(0) = ±1. Statistics move by a tenth towards mean 1, variance 0.
    assert state.weights.tolist() == [1, 0, 1, 0, 1]
    assert memory["a"].personal.tolist() == pytest.approx([1, 0.5, 0.1, 0.9])
    assert memory["b"].personal.tolist() == pytest.approx([1, -0.5, 0.1, 0.9])
    state, memory = run_rounds(normed_pixel(), clients, num_rounds=2)
    # z = β = ±½: ∂β = ∓2 σ(-1), and ∂b = -2 · ½ σ(-1) for both.
    head = 1 + 0.5 * SIGMA_1
    assert state.weights.tolist() == pytest.approx([1, 0, head, 0, 1], abs=1e-6)
    kept = [1, 0.5 + SIGMA_1, 0.19, 0.81]
    assert memory["a"].personal.tolist() == pytest.approx(kept, abs=1e-6)


def test_unseen_clients_learn_batch_norm_alone(
    white: MakeClient, key: RandomKey
) -> None:
    payload = ModelPayload(torch.tensor([1.0, 0, 1, 0, 1]))
    served = one_model_of(normed_pixel(1), payload, None, white([1, 1]), key)
    assert served.weights.tolist() == pytest.approx([1, -0.5, 1, 0.1, 0.9])


def test_unseen_clients_statistics_come_close_to_their_data(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task = normed_task(TrainingSettings(batch_size=8, learning_rate=0.01))
    data = noisy(8, 0, seed=4)
    payload = ModelPayload(task.initial_weights)
    method = FedBN(task, FedBNSettings(unseen_epochs=60))
    served = one_model_of(method, payload, None, data, key)
    task.model.load(task.initial_weights)
    convolution = task.model.module.get_submodule("features.0")
    with torch.inference_mode():
        features = convolution(task.normalize(data.train.images)).flatten(1)
    found = task.model.named(served.weights)
    mean, variance = features.mean(dim=0), features.var(dim=0)
    # 0.9^60 = 0.002 of where they start is left.
    torch.testing.assert_close(
        found["features.1.running_mean"], mean, rtol=0.01, atol=0.01
    )
    torch.testing.assert_close(
        found["features.1.running_var"], variance, rtol=0.01, atol=0.01
    )


def test_batch_norm_stays_with_the_clients(
    normed_task: MakeTask, noisy: MakeClient, run_rounds: RunRounds
) -> None:
    task = normed_task(TrainingSettings(batch_size=3, learning_rate=0.1))
    clients = {name: noisy(6, 0, seed=i) for i, name in enumerate("ab")}
    method = FedBN(task, FedBNSettings())
    state, memory = run_rounds(method, clients, num_rounds=2)
    before, after = (
        task.model.named(weights) for weights in (task.initial_weights, state.weights)
    )
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    names = ("weight", "bias", "running_mean", "running_var")
    # BatchNorm takes off what a convolution's bias adds: it has no gradient.
    assert unchanged - {"features.0.bias"} == {f"features.1.{name}" for name in names}
    assert not torch.equal(memory["a"].personal, memory["b"].personal)
    assert len(memory["a"].personal) == 16


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3), TolerantBatchNorm2d(3), nn.BatchNorm3d(3)]
)
def test_batch_norm_is_known_by_its_type(layer: nn.Module) -> None:
    assert isinstance(layer, BATCH_NORMS)
    assert not isinstance(nn.InstanceNorm2d(3, affine=True), BATCH_NORMS)


def test_a_model_without_batch_norm_is_refused(linear_task: MakeTask) -> None:
    with pytest.raises(ConfigError) as caught:
        FedBN(linear_task(HALF), FedBNSettings())
    (problem,) = caught.value.problems
    assert problem.place == "method.name"
    assert "found fedbn with a model without BatchNorm" in problem.message
