import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from knnper.data.examples import ClientData, Examples, InputSpec, no_examples
from knnper.experiment import TrainingSettings
from knnper.models import EmbeddingModel
from knnper.seeding import RandomKey
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.task import Task
from knnper.strategies.knn_per import KnnSettings, memorize
from knnper.strategies.pfedgp import (
    GaussianProcessPredictor,
    PFedGP,
    PFedGPSettings,
    SharedNetwork,
)
from tests.strategies.tiny import KEY, noisy, normed_task, run_rounds, task_of

TWO_PIXELS = InputSpec((1, 2, 1), num_classes=3, mean=(0.0,), std=(1.0,))
LINEAR = PFedGPSettings(kernel="linear", output_scale=2.0, num_iterations=1)


class ScaledModel(EmbeddingModel):
    """φ(x) = (a x₁, b x₂) of two pixels; a = b = 1 at first, and an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 2, 3
        self.scale = nn.Parameter(torch.ones(2))
        self.classifier = nn.Linear(2, 3)

    def embed(self, x: Tensor) -> Tensor:
        return self.scale * x.flatten(start_dim=1)


def scaled_task(**training: Any) -> Task:
    return task_of(ScaledModel, TWO_PIXELS, TrainingSettings(**training))


def client(examples: Mapping[tuple[int, int], int]) -> ClientData:
    """Make a client from labels by black (0) and white (1) pixels."""
    images = 255 * torch.tensor(list(examples), dtype=torch.uint8)
    labels = torch.tensor(list(examples.values()))
    train = Examples(images.reshape(-1, 1, 2, 1), labels)
    return ClientData(train, no_examples(TWO_PIXELS))


def omega_of(mean: float, variance: float) -> float:
    c = math.sqrt(mean**2 + variance)
    return math.tanh(c / 2) / (2 * c)


def log_sigmoid_mean(mean: float, variance: float) -> float:
    f = np.linspace(mean - 12 * variance**0.5, mean + 12 * variance**0.5, 100_001)
    density = np.exp(-((f - mean) ** 2) / (2 * variance))
    return math.log(np.average(1 / (1 + np.exp(-f)), weights=density))


def two_point_loss(a: float, b: float, omega: tuple[float, float]) -> float:
    """Return the loss of (1, 0) with label 0 and (1, 1) with label 1, by hand.

    K = s [[a², a²], [a², a² + b²]], s = 2, and the observations are κ/ω = ±½/ω with
    variance 1/ω. One example predicts the other: mean K₁₂ t / (K + 1/ω), variance
    K - K₁₂² / (K + 1/ω).
    """
    k11, k12, k22 = 2 * a * a, 2 * a * a, 2 * (a * a + b * b)
    first, second = k11 + 1 / omega[0], k22 + 1 / omega[1]
    of_first = log_sigmoid_mean(k12 * -0.5 / omega[1] / second, k11 - k12**2 / second)
    of_second = log_sigmoid_mean(-k12 * 0.5 / omega[0] / first, k22 - k12**2 / first)
    return -(of_first + of_second) / 2


def one_iteration() -> tuple[float, float]:
    """Return ω after one round of coordinate ascent at a = b = 1.

    K = [[2, 2], [2, 4]] and K⁻¹ = [[1, -½], [-½, ½]]. With ω = ¼ at first,
    Σ⁻¹ = K⁻¹ + ¼ I = [[5/4, -½], [-½, ¾]], of determinant 11/16, so that
    Σ = [[12, 8], [8, 20]] / 11 and the mean is Σ (½, -½) = (2, -6) / 11.
    """
    return omega_of(2 / 11, 12 / 11), omega_of(-6 / 11, 20 / 11)


def test_one_round_by_hand() -> None:
    rate, step = 0.5, 1e-5
    task = scaled_task(learning_rate=rate, batch_size=2)
    clients = {"a": client({(1, 0): 0, (1, 1): 1}), "b": client({(1, 0): 2})}
    state, _ = run_rounds(PFedGP(task, LINEAR), clients, num_rounds=1)

    omega = one_iteration()
    by_a = two_point_loss(1 + step, 1, omega) - two_point_loss(1 - step, 1, omega)
    by_b = two_point_loss(1, 1 + step, omega) - two_point_loss(1, 1 - step, omega)
    # b has one class: it learns nothing, and counts for one of three examples.
    expected = [1 - 2 / 3 * rate * by / (2 * step) for by in (by_a, by_b)]
    assert state.network[:2].tolist() == pytest.approx(expected, abs=2e-5)
    assert abs(expected[0] - 1) > 0.01
    assert abs(expected[1] - 1) > 0.01


def test_the_loss_of_a_round_by_hand() -> None:
    task = scaled_task(batch_size=2)
    data = client({(1, 0): 0, (1, 1): 1})
    payload = SharedNetwork(task.initial_weights)
    _, update = PFedGP(task, LINEAR).client_update(payload, None, data, 1, KEY)
    expected = two_point_loss(1, 1, one_iteration())
    assert update.train_loss == pytest.approx(expected, abs=1e-4)
    assert update.num_examples == 2


def test_the_network_moves_and_the_head_stays() -> None:
    task = normed_task(batch_size=4, learning_rate=0.1, weight_decay=0.1)
    clients = {name: noisy(9 + i, 0, seed=i) for i, name in enumerate("abc")}
    state, _ = run_rounds(PFedGP(task, PFedGPSettings()), clients, num_rounds=3)
    moved = state.network != task.initial_weights
    assert not bool(moved[task.head_mask].any())
    assert bool(moved[~task.head_mask].all())


def test_without_examples_nothing_moves() -> None:
    task = normed_task()
    method = PFedGP(task, PFedGPSettings())
    nothing = ClientData(no_examples(task.spec), no_examples(task.spec))
    payload = SharedNetwork(task.initial_weights)
    _, update = method.client_update(payload, None, nothing, 1, KEY)
    assert torch.equal(update.weights, task.initial_weights)


def served(
    task: Task, data: ClientData, settings: PFedGPSettings | None = None, seed: int = 3
) -> GaussianProcessPredictor:
    method = PFedGP(task, settings or PFedGPSettings())
    payload = method.broadcast(
        SharedNetwork(task.initial_weights), UNSEEN_CLIENT, RandomKey(2)
    )
    predictor = method.personalize(payload, None, data, RandomKey(seed))
    assert isinstance(predictor, GaussianProcessPredictor)
    return predictor


def test_an_unseen_client_is_served_what_its_own_examples_say() -> None:
    task = scaled_task()
    data = client({(0, 0): 2, (0, 1): 2, (1, 0): 0, (1, 1): 0})
    settings = PFedGPSettings(length_scale=0.3)
    found = served(task, data, settings)(data.train.images)
    assert found.argmax(dim=1).tolist() == [2, 2, 0, 0]
    # The class it never saw: one in n + 1.
    assert found[:, 1].tolist() == pytest.approx([0.2] * 4)


def test_without_data_all_classes_are_alike() -> None:
    nothing = ClientData(no_examples(TWO_PIXELS), no_examples(TWO_PIXELS))
    predictor = served(scaled_task(), nothing)
    images = client({(0, 0): 0, (1, 0): 0}).train.images
    assert predictor(images).flatten().tolist() == pytest.approx([1 / 3] * 6)
    assert predictor.describe() == {"num_gp_examples": 0.0}


def test_both_splits_are_learnt_from_and_validation_can_be_forgotten() -> None:
    task, queries = normed_task(), noisy(6, 0, seed=8).train.images
    data, nothing = noisy(7, 5, seed=1), no_examples(task.spec)
    alone = served(task, replace(data, validation=nothing))
    both = served(task, ClientData(data.train_and_validation(), nothing))
    found = served(task, data)
    assert found.describe() == {"num_gp_examples": 12.0}
    # As one split they are another batch: φ differs by some 1e-6 of itself, and what
    # the posterior makes of it is smooth, its matrix having no eigenvalue below 1.
    torch.testing.assert_close(found(queries), both(queries), rtol=0, atol=1e-4)
    assert not torch.allclose(found(queries), alone(queries), atol=1e-2)
    forgetful = found.without_validation()
    assert torch.equal(forgetful(queries), alone(queries))
    assert forgetful.without_validation() is forgetful
    assert alone.without_validation() is alone


def test_the_examples_are_limited_by_chance() -> None:
    task, queries = normed_task(), noisy(6, 0, seed=8).train.images
    data, few = noisy(9, 3, seed=1), PFedGPSettings(max_examples=4)
    first, again, other = (served(task, data, few, seed) for seed in (3, 3, 4))
    assert first.describe() == {"num_gp_examples": 4.0}
    assert torch.equal(first(queries), again(queries))
    assert not torch.equal(first(queries), other(queries))
    assert first.without_validation().describe() == {"num_gp_examples": 4.0}
    # Where all fit there is no chance.
    all_of_them = (served(task, data, seed=seed)(queries) for seed in (3, 4))
    assert torch.equal(*all_of_them)


def test_a_memory_can_be_put_on_top() -> None:
    task, data = normed_task(), noisy(8, 5, seed=1)
    base, queries = served(task, data), noisy(6, 0, seed=8).train.images
    nearest = KnnSettings(knn_weights=(0.25,))
    found = memorize(base, 3, data, nearest, RandomKey(1))
    neighbors = memorize(base, 3, data, KnnSettings(knn_weights=(1.0,)), RandomKey(1))
    expected = 0.25 * neighbors(queries) + 0.75 * base(queries)
    torch.testing.assert_close(found(queries), expected)
    assert found.describe()["num_gp_examples"] == 13.0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_lowers_the_loss(precision: Any) -> None:
    task = normed_task(batch_size=9, learning_rate=0.3, precision=precision)
    generator = KEY.child("images").numpy()
    labels = torch.arange(9) % 3
    values = 100 * labels[:, None] + torch.from_numpy(generator.integers(0, 50, (9, 4)))
    images = values.to(torch.uint8).reshape(9, 2, 2, 1)
    data = ClientData(Examples(images, labels), no_examples(task.spec))
    method = PFedGP(task, PFedGPSettings())
    state, _ = run_rounds(method, {"a": data}, num_rounds=15)
    losses = [
        method.client_update(SharedNetwork(network), None, data, 1, KEY)[1].train_loss
        for network in (task.initial_weights, state.network)
    ]
    assert losses[1] < 0.9 * losses[0]
