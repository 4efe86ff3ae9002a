"""pFedFDA: a round by hand on one feature, and what a client chooses by brute force."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from knnper.data.examples import ClientData, Examples
from knnper.embedding_model import EmbeddingModel
from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.strategies.core.task import Task
from knnper.strategies.fedbabu import FedBABU, FedBABUSettings
from knnper.strategies.pfedfda import (
    Gaussians,
    ModelAndGaussians,
    PFedFDA,
    PFedFDASettings,
    PFedFDAUpdate,
    halves,
)
from tests.strategies.tiny import (
    KEY,
    ONE_PIXEL,
    noisy,
    normed_task,
    run_rounds,
    task_of,
    two_weights_task,
)

HALF = TrainingSettings(learning_rate=0.5)
NORMED = TrainingSettings(num_rounds=3, batch_size=3, learning_rate=0.1, momentum=0.5)
FIXED = PFedFDASettings(interpolation_weight=0.25, covariance_ridge=0.5)
Array = NDArray[np.float64]


class OneFeature(EmbeddingModel):
    """z = a x, and a linear head of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.num_classes = 1, 2
        self.body = nn.Linear(1, 1, bias=False)
        self.classifier = nn.Linear(1, 2)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.body(x.flatten(start_dim=1))
        return features


def one_feature_task() -> Task:
    return task_of(OneFeature, ONE_PIXEL, HALF, torch.tensor([2.0, 0, 0, 0, 0]))


def pixels(values: Sequence[float], labels: Sequence[int]) -> Examples:
    grey = torch.tensor([round(255 * value) for value in values], dtype=torch.uint8)
    return Examples(grey[:, None, None, None], torch.tensor(labels))


NOTHING = pixels([], []).take(torch.tensor([], dtype=torch.int64))
OF_A = [1.0, 0.6, 0.2], [0, 0, 1]
OF_B = [0.4, 0.8], [1, 1]


def gaussians(means: Sequence[float], variance: float) -> Gaussians:
    return Gaussians(torch.tensor(means)[:, None], torch.tensor([[variance]]))


def known_state(method: PFedFDA, a: float, features: Gaussians) -> ModelAndGaussians:
    update = PFedFDAUpdate(torch.tensor([a]), 1, 0.5, features)
    return method.aggregate(method.init(("a", "b"), KEY), [("a", update)])


def prior_of(labels: Sequence[int], num_classes: int = 2) -> Array:
    frequencies = np.bincount(labels, minlength=num_classes) / len(labels)
    return np.asarray((frequencies + 1e-4) / (1 + num_classes * 1e-4))


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def posterior(z: Array, means: Array, variance: float, prior: Array) -> Array:
    """Return P(y | z) by Bayes' rule, (n, 2), from densities on a line."""
    logs = np.log(prior) - (z[:, None] - means) ** 2 / (2 * variance)
    return softmax(logs)


def test_a_round_by_hand() -> None:
    method = PFedFDA(one_feature_task(), FIXED)
    before = known_state(method, 2.0, gaussians([0.5, 1.5], 0.8))
    expected = []
    for values, labels in (OF_A, OF_B):
        x, prior = np.array(values), prior_of(labels)
        beliefs = posterior(2 * x, np.array([0.5, 1.5]), 0.8, prior)
        wrong = beliefs - np.eye(2)[labels]
        a = 2 - 0.5 * float((wrong @ np.array([0.5, 1.5]) / 0.8 * x).mean())
        z, classes = a * x, np.array(labels)
        means = np.array(
            [z[classes == y].mean() if y in labels else 0.5 for y in (0, 1)]
        )
        scatter = float(((z - means[classes]) ** 2).sum())
        variance = scatter / (len(z) - 1) + 0.5
        mixed = 0.25 * means + 0.75 * np.array([0.5, 1.5])
        expected.append((len(z), a, mixed, 0.25 * variance + 0.75 * 0.8))
    updates = []
    for name, split in (("a", OF_A), ("b", OF_B)):
        data = ClientData(pixels(*split), NOTHING)
        payload = method.broadcast(before, name, KEY)
        _, update = method.client_update(payload, None, data, 1, KEY)
        updates.append((name, update))
    for (_, update), (_, a, means, variance) in zip(updates, expected, strict=True):
        assert update.shared.tolist() == pytest.approx([a], abs=1e-5)
        assert update.features.means[:, 0].tolist() == pytest.approx(means, abs=1e-5)
        assert float(update.features.covariance) == pytest.approx(variance, abs=1e-5)
    after = method.aggregate(before, updates)
    shares = np.array([0.6, 0.4])
    body = shares @ np.array([client[1] for client in expected])
    means = shares @ np.stack([client[2] for client in expected])
    variance = shares @ np.array([client[3] for client in expected])
    assert after.features.means[:, 0].tolist() == pytest.approx(means, abs=1e-5)
    # A linear discriminant: slopes m / s, intercepts -m² / 2s.
    head = [*(means / variance), *(-(means**2) / (2 * variance))]
    assert after.weights.tolist() == pytest.approx([body, *head], abs=1e-4)


def test_with_weight_zero_its_rounds_are_fedbabus_under_its_first_head() -> None:
    task = normed_task(NORMED)
    clients = {name: noisy(6, 2, seed=i) for i, name in enumerate("ab")}
    even = torch.tensor([0, 1, 2, 0, 1, 2])
    clients = {
        name: replace(data, train=replace(data.train, labels=even))
        for name, data in clients.items()
    }
    method = PFedFDA(task, PFedFDASettings(interpolation_weight=0.0))
    state, _ = run_rounds(method, clients, num_rounds=3)
    start = method.init(("a", "b"), KEY.child("init"))
    assert torch.equal(state.features.means, start.features.means)
    # Equal frequencies move all logits by log ⅓.
    tensors = task.model.named(start.weights)
    tensors["classifier.bias"] = tensors["classifier.bias"].double() + np.log(1 / 3)
    under_it = replace(task, initial_weights=task.model.flatten(tensors))
    fedbabu = FedBABU(under_it, FedBABUSettings())
    expected, _ = run_rounds(fedbabu, clients, num_rounds=3)
    body = ~task.head_mask
    assert torch.equal(state.weights[body], expected.weights[body])
    learning = PFedFDA(task, PFedFDASettings())
    other, _ = run_rounds(learning, clients, num_rounds=3)
    assert not torch.equal(other.weights[body], expected.weights[body])


@pytest.mark.parametrize(
    ("weight", "means", "of_one", "of_both"),
    # z = 2x: 2.0 and 1.2 of class 0, around 1.6, and 0.4 of class 1, twice with the
    # validation split. The scatter is 0.32.
    [
        (0.0, [0.5, 1.5], 0.8, 0.8),
        (1.0, [1.6, 0.4], 0.32 / 2 + 0.5, 0.32 / 3 + 0.5),
    ],
)
def test_what_is_served_by_hand(
    weight: float, means: list[float], of_one: float, of_both: float
) -> None:
    settings = replace(FIXED, interpolation_weight=weight)
    method = PFedFDA(one_feature_task(), settings)
    payload = known_state(method, 2.0, gaussians([0.5, 1.5], 0.8))
    data = ClientData(pixels(*OF_A), pixels([0.2], [1]))
    queries = pixels([0.0, 0.4, 1.0], [0, 0, 0]).images
    served = method.personalize(payload, None, data, KEY)
    alone = served.without_validation()
    z, m = np.array([0.0, 0.8, 2.0]), np.array(means)
    np.testing.assert_allclose(
        served(queries), posterior(z, m, of_both, prior_of([0, 0, 1, 1])), atol=1e-5
    )
    np.testing.assert_allclose(
        alone(queries), posterior(z, m, of_one, prior_of([0, 0, 1])), atol=1e-5
    )
    assert served.describe() == {"mean_weight": weight, "covariance_weight": weight}


def cross_validated(
    weights: Sequence[float],
    of_all: tuple[Array, Array],
    embeddings: Array,
    labels: Array,
) -> float:
    """Return the loss on both halves, by inverse matrices, class by class."""
    parts = [half.numpy() for half in halves(torch.from_numpy(labels), KEY)]
    prior, loss = prior_of(labels.tolist(), 3), 0.0
    for fitted, scored in (parts, parts[::-1]):
        z, y = embeddings[fitted], labels[fitted]
        means = np.stack(
            [z[y == k].mean(axis=0) if k in y else of_all[0][k] for k in range(3)]
        )
        away = z - means[y]
        covariance = away.T @ away / (len(z) - 1) + 0.1 * np.eye(4)
        means = weights[0] * means + (1 - weights[0]) * of_all[0]
        mixed = weights[1] * covariance + (1 - weights[1]) * of_all[1]
        mixed = (1 - 1e-4) * mixed + 1e-4 * np.trace(mixed) / 4 * np.eye(4)
        inverse = np.linalg.inv(mixed)
        distances = [
            np.einsum("np,pq,nq->n", z - m, inverse, z - m)
            for z, m in ((embeddings[scored], m) for m in means)
        ]
        probabilities = softmax(np.log(prior) - 0.5 * np.stack(distances, axis=1))
        loss -= float(
            np.log(probabilities[np.arange(len(scored)), labels[scored]]).mean()
        )
    return loss


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_weights_are_chosen_as_by_brute_force(seed: int, separate: bool) -> None:
    task = normed_task(NORMED)
    settings = PFedFDASettings(separate_weights=separate, covariance_ridge=0.1)
    method = PFedFDA(task, settings)
    payload = method.init(("a",), KEY)
    data = noisy(24, 0, seed=seed)
    embeddings = task.embed(payload.weights, data.train.images).double().numpy()
    features = payload.features.means.double().numpy(), np.eye(4)
    labels = data.train.labels.numpy()

    def loss(weights: Sequence[float]) -> float:
        return cross_validated(weights, features, embeddings, labels)

    chosen = method.personalize(payload, None, data, KEY).describe()
    grid = np.linspace(0, 1, 26)
    tried = itertools.product(grid, grid) if separate else zip(grid, grid, strict=True)
    assert loss([*chosen.values()]) <= min(map(loss, tried)) + 1e-3
    assert separate or len({*chosen.values()}) == 1


def test_halves_have_half_of_each_class() -> None:
    labels = torch.tensor([0] * 5 + [2] * 4 + [1] * 3)
    first, second = halves(labels, KEY)
    assert sorted(torch.cat([first, second]).tolist()) == list(range(12))
    counts = [torch.bincount(labels[half], minlength=3) for half in (first, second)]
    assert int((counts[0] - counts[1]).abs().max()) <= 1


def test_what_has_no_second_example_of_a_class_takes_the_global_estimates() -> None:
    method = PFedFDA(one_feature_task(), PFedFDASettings())
    payload = known_state(method, 2.0, gaussians([0.5, 1.5], 0.8))
    data = ClientData(pixels([0.2, 0.8], [0, 1]), NOTHING)
    served = method.personalize(payload, None, data, KEY)
    assert served.describe() == {"mean_weight": 0.0, "covariance_weight": 0.0}


def test_a_covariance_is_one_and_a_head_is_linear() -> None:
    method = PFedFDA(one_feature_task(), FIXED)
    payload = known_state(method, 2.0, gaussians([0.5, 1.5], 0.0))
    assert bool(torch.isfinite(payload.weights).all())
    good = PFedFDAUpdate(torch.tensor([2.0]), 1, 0.5, gaussians([0, 1], 0.5))
    assert method.update_problem(payload, good) is None
    wrong = replace(good, features=gaussians([0, 1], -0.5))
    assert "negative variance" in str(method.update_problem(payload, wrong))
    with pytest.raises(ConfigError, match="one linear layer with a bias"):
        PFedFDA(two_weights_task(HALF, a=1, b=1), FIXED)
