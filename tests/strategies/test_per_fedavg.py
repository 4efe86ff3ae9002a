"""Per-FedAvg on two parameters, and at an inner rate of 0."""

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from knnper.data.examples import ClientData, Examples
from knnper.experiment import TrainingSettings
from knnper.strategies.core.method import Method
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalModel, local_sgd
from knnper.strategies.per_fedavg import PerFedAvg, PerFedAvgSettings, hessian_product
from tests.strategies.tiny import (
    KEY,
    linear_task,
    of_name,
    one_model_of,
    run_rounds,
    white,
)

Variant = Literal["first_order", "hessian_free"]

VARIANTS: tuple[Variant, ...] = ("first_order", "hessian_free")
EVERYTHING = TrainingSettings(
    batch_size=3, local_steps=5, learning_rate=0.1, momentum=0.5, weight_decay=0.01
)
WRONG = 0.2689414  # 1 - σ(1): p(1) where the logits are (½, -½)


def method_of(task: Task, variant: Variant, inner: float, epochs: int = 1) -> Method:
    settings = PerFedAvgSettings(inner, variant, 0.01, adaptation_epochs=epochs)
    return PerFedAvg(task, settings)


def mixed(count: int, seed: int) -> ClientData:
    """Return a client with random rows of 4 pixels, of 2 classes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 1, 4, 1)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 2, (count,), generator=generator)
    train = Examples(images, labels)
    return ClientData(train, train.take(torch.arange(0)))


@pytest.mark.parametrize(
    ("variant", "moved"), [("first_order", WRONG), ("hessian_free", WRONG / 2)]
)
def test_a_step_by_hand(variant: Variant, moved: float) -> None:
    # From 0, ∇f = (-½, ½) and w̃ = (½, -½) with α = 1. There v = (-q, q), q = 1 - σ(1).
    # The Hessian at 0 is ¼ [[1, -1], [-1, 1]], so that (I - H) v = v - ½ v.
    task = linear_task(learning_rate=1.0)
    payload = ModelPayload(torch.zeros(2))
    method = method_of(task, variant, inner=1.0)
    _, update = method.client_update(payload, None, white([0]), 1, KEY)
    assert update.weights.tolist() == pytest.approx([moved, -moved], abs=1e-5)
    # -log σ(1): the loss after the inner step, not before it.
    assert update.train_loss == pytest.approx(0.3132617, abs=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_an_inner_step_it_is_fedavg(variant: Variant) -> None:
    task = linear_task(EVERYTHING, num_pixels=4)
    clients = {name: mixed(7 + seed, seed) for seed, name in enumerate("abc")}
    expected, _ = run_rounds(of_name("fedavg", task), clients, num_rounds=3)
    state, _ = run_rounds(method_of(task, variant, 0.0), clients, num_rounds=3)
    assert torch.equal(state.weights, expected.weights)
    adapting, _ = run_rounds(method_of(task, variant, 0.5), clients, num_rounds=3)
    assert not torch.allclose(adapting.weights, expected.weights)


def test_the_hessian_product_is_that_of_double_differentiation() -> None:
    task = linear_task(batch_size=8, num_pixels=4)
    weights = torch.linspace(-1.0, 1.0, 8)
    vector = torch.tensor([0.5, -1.0, 0.25, 0.0, 1.0, -0.5, 0.75, -0.25])
    data = mixed(8, 1).train
    products: list[Tensor] = []

    def step(model: LocalModel) -> Tensor:
        products.append(hessian_product(model, model.independent_batch(), vector, 0.01))
        assert torch.equal(model.parameters, weights)
        return torch.zeros(())

    local_sgd(task, weights, data, 0.1, KEY, num_epochs=1, local_step=step)
    inputs = task.normalize(data.images).flatten(start_dim=1)

    def loss(flat: Tensor) -> Tensor:
        return functional.cross_entropy(inputs @ flat.view(2, 4).T, data.labels)

    at = weights.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at, create_graph=True)
    (expected,) = torch.autograd.grad(gradient @ vector, at)
    torch.testing.assert_close(products[0], expected, rtol=1e-3, atol=1e-5)


def test_both_passes_of_a_difference_drop_the_same_units() -> None:
    task = linear_task(batch_size=8, num_pixels=4)

    def dropping(x: Tensor) -> Tensor:
        return functional.dropout(x.flatten(start_dim=1), 0.5)

    task.model.module.embed = dropping  # type: ignore[method-assign]
    sizes: list[float] = []

    def step(model: LocalModel) -> Tensor:
        batch, vector = model.next_batch(), torch.zeros(8)
        sizes.append(float(hessian_product(model, batch, vector, 1e-6).abs().max()))
        return torch.zeros(())

    local_sgd(
        task, torch.ones(8), mixed(8, 1).train, 0.1, KEY, num_epochs=3, local_step=step
    )
    # In the direction 0 nothing changes, however small the difference.
    assert sizes == [0.0, 0.0, 0.0]


def test_clients_are_served_the_adapted_model() -> None:
    task = linear_task(learning_rate=9.0, momentum=0.9, weight_decay=0.5)
    payload, data = ModelPayload(torch.zeros(2)), white([0, 0], [1, 1])
    method = method_of(task, "first_order", inner=0.5, epochs=1)
    predictor = one_model_of(method, payload, None, data)
    # Both splits together pull to neither side; the training split alone makes a step
    # of α (½, -½) = (¼, -¼), with nothing of momentum, weight decay and β.
    assert predictor.weights.tolist() == [0.0, 0.0]
    alone = predictor.without_validation()
    assert alone.weights.tolist() == [0.25, -0.25]
    assert alone.without_validation() is alone


def test_steps_follow_one_another() -> None:
    task = linear_task()
    payload = ModelPayload(torch.zeros(2))
    method = method_of(task, "hessian_free", inner=1.0, epochs=2)
    predictor = one_model_of(method, payload, None, white([0]))
    # ½, then 1 - σ(1) more.
    assert float(predictor.weights[0]) == pytest.approx(0.5 + WRONG, abs=1e-6)
    as_it_is = method_of(task, "hessian_free", inner=1.0, epochs=0)
    unchanged = one_model_of(as_it_is, payload, None, white([0]))
    assert torch.equal(unchanged.weights, payload.weights)
