"""DP-SGD: gradients by hand and by brute force, its noise, its sampling, its ε."""

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.experiment_file import from_json, load_experiment, to_json
from knnper.privacy_settings import ExamplePrivacySettings
from knnper.records import take_apart
from knnper.seeding import RandomKey
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core.assembly import assemble
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.private_examples import (
    epsilon_of_examples,
    poisson_batches,
)
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from knnper.strategies.knn_per import KnnMemory
from tests.strategies.method_checks import document, refused
from tests.strategies.tiny import (
    FOUR_PIXELS,
    KEY,
    linear_task,
    noisy,
    of_name,
    plain_task,
    run_rounds,
    white,
)

NEVER = 1e6  # a clip norm that no gradient reaches


def private(
    longest: float, noise_multiplier: float = 0.0, /, **training: Any
) -> TrainingSettings:
    settings = ExamplePrivacySettings(longest, noise_multiplier)
    return TrainingSettings(example_privacy=settings, **training)


def trained(task: Task, data: ClientData, key: RandomKey = KEY) -> Tensor:
    rate = task.training.learning_rate
    return local_sgd(task, task.initial_weights, data.train, rate, key).weights


def test_clipped_step_by_hand() -> None:
    # At W = 0 the gradient of each white pixel is (-½, ½) for label 0, of norm √½. Half
    # as long, two of label 0 and one of label 1 leave one (-¼, ¼), divided by B = 3.
    training = private(math.sqrt(0.5) / 2, batch_size=3, learning_rate=0.6)
    weights = trained(linear_task(training), white([0, 0, 1]))
    assert weights.tolist() == pytest.approx([0.05, -0.05])


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.5, "weight_decay": 0.1},
        {"class_weights": (1.0, 0.5, 2.0)},
        {"clip_norm": 0.3},
    ],
)
def test_without_noise_and_clipping_it_is_plain_sgd(options: dict[str, Any]) -> None:
    settings = {"batch_size": 9, "learning_rate": 0.3, "local_epochs": 4, **options}
    data = noisy(9, 0, seed=1)
    expected = trained(plain_task(TrainingSettings(**settings)), data)
    weights = trained(plain_task(private(NEVER, **settings)), data)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    clipped = trained(plain_task(private(0.1, **settings)), data)
    assert not torch.allclose(clipped, expected, atol=1e-4)


def task_of_model(**model: Any) -> Task:
    """Return the task of a network for 2x2 images in full batches."""
    section = {"clip_norm": 0.4, "noise_multiplier": 0.0}
    training = {"example_privacy": section, "batch_size": 8, "learning_rate": 0.5}
    sections = {"model": model, "training": training}
    experiment = load_experiment(document(**sections), experiment_catalogue())
    return assemble(experiment, FOUR_PIXELS).task


@pytest.mark.parametrize(
    "model",
    [
        {"name": "mlp", "hidden_sizes": [8, 4]},
        {"name": "tiny_cnn", "norm": "group", "embedding_dim": 4},
    ],
)
def test_gradients_are_those_of_single_examples(model: dict[str, Any]) -> None:
    """Each example alone, by autograd, clipped and summed."""
    task, data = task_of_model(**model), noisy(7, 0, seed=2)
    total, norms = torch.zeros(task.model.num_parameters), []
    for position in range(7):
        example = data.train.take(torch.tensor([position]))
        task.model.load(task.initial_weights)
        task.model.module.train()
        task.model.gradient.zero_()
        inputs = task.normalize(example.images)
        loss = task.model.module.losses(inputs, example.labels)
        loss.sum().backward()  # type: ignore[no-untyped-call]
        norms.append(float(task.model.gradient.norm()))
        total += task.model.gradient * min(1.0, 0.4 / norms[-1])
    assert max(norms) > 0.4
    expected = task.initial_weights - 0.5 * total / 7
    torch.testing.assert_close(trained(task, data), expected, rtol=1e-4, atol=1e-6)


def test_noise_has_the_deviation_of_the_clip_norm() -> None:
    """One step along noise alone: the gradients of two labels cancel."""
    training = private(0.25, 3.0, batch_size=2, learning_rate=1.0)
    task = linear_task(training, num_pixels=2000)
    images = torch.full((2, 1, 2000, 1), 255, dtype=torch.uint8)
    data = ClientData(Examples(images, torch.tensor([0, 1])), white([]).train)
    weights = trained(task, data).double().numpy()
    deviation = 3.0 * 0.25 / 2
    assert weights.std() == pytest.approx(deviation, rel=0.05)
    assert abs(weights.mean()) < 4 * deviation / math.sqrt(len(weights))
    # Kolmogorov and Smirnov's statistic, 2.2 / √n at a probability of 1e-4.
    sorted_noise = np.sort(weights / deviation)
    normal = [0.5 * (1 + math.erf(x / math.sqrt(2))) for x in sorted_noise]
    places = np.arange(1, len(weights) + 1) / len(weights)
    assert np.abs(normal - places).max() < 2.2 / math.sqrt(len(weights))
    assert np.array_equal(trained(task, data).numpy(), weights.astype(np.float32))
    assert not torch.equal(trained(task, data, RandomKey(5)), trained(task, data))


def test_examples_are_sampled_independently() -> None:
    batches = poisson_batches(10, 2, RandomKey(3).numpy())
    members = np.zeros((4000, 10))
    for row in members:
        row[next(batches).numpy()] = 1
    assert members.mean(axis=0) == pytest.approx([0.2] * 10, abs=0.03)
    covariance = np.cov(members.T) - np.diag([0.16] * 10)
    assert np.abs(covariance).max() < 0.02
    # (1 - q)^n of the mini-batches are empty.
    empty = (members.sum(axis=1) == 0).mean()
    assert empty == pytest.approx(0.8**10, abs=0.02)


def test_empty_batches_make_steps_of_noise() -> None:
    training = private(1.0, 1.0, batch_size=1, learning_rate=0.1, local_steps=30)
    result = local_sgd(
        linear_task(training), torch.zeros(2), white([0, 1, 0]).train, 0.1, KEY
    )
    assert result.num_steps == 30
    assert bool(result.weights.isfinite().all())
    assert math.isnan(result.train_loss)


def test_sum_is_divided_by_the_expected_size_of_a_batch() -> None:
    """Each example of a batch of any size moves W by ½ / B times the rate."""
    training = private(NEVER, batch_size=2, learning_rate=0.1, local_steps=1)
    sizes = set()
    for seed in range(6):
        key = RandomKey(seed)
        weights = trained(linear_task(training), white([0] * 8), key)
        batches = poisson_batches(8, 2, key.child("private batches").numpy())
        size = len(next(batches))
        sizes.add(size)
        moved = 0.1 * 0.5 * size / 2
        assert weights.tolist() == pytest.approx([moved, -moved], abs=1e-6)
    assert len(sizes) > 1


def test_weighted_gradient_is_clipped_with_its_weight() -> None:
    training = private(0.1, batch_size=1, learning_rate=1.0, class_weights=(10.0, 1.0))
    weights = trained(linear_task(training), white([0]))
    assert float(weights.norm()) == pytest.approx(0.1)


def test_frozen_weights_get_no_noise_and_do_not_count_in_norms() -> None:
    task, data = plain_task(), noisy(1, 0, seed=1)
    first = task.model.entries[0]
    trainable = torch.zeros(task.model.num_weights, dtype=torch.bool)
    trainable[first.start : first.stop] = True
    for noise in (0.0, 1.0):
        training = private(0.05, noise, batch_size=1)
        private_task = replace(task, training=training)
        result = local_sgd(
            private_task,
            task.initial_weights,
            data.train,
            0.5,
            KEY,
            trainable=trainable,
        )
        moved = result.weights - task.initial_weights
        assert not bool(moved[~trainable].any())
        if noise:
            assert bool(moved[trainable].all())
        else:
            assert float(moved.norm()) == pytest.approx(0.5 * 0.05, rel=1e-4)


SENDING_GRADIENTS = [
    name
    for name, kind in METHODS.items()
    if kind.sends_gradients_only and name not in ("local", "fedbn")
]
"""Without the methods that send nothing, or need BatchNorm."""


@pytest.mark.parametrize("name", SENDING_GRADIENTS)
def test_updates_depend_on_examples_through_clipped_gradients_only(name: str) -> None:
    """Two rounds on other data of the same size, whose clipped gradients vanish."""
    task = plain_task(private(1e-9, batch_size=4, learning_rate=0.1))
    states = []
    for seed in (0, 50):
        clients = {c: noisy(6 + i, 2, seed=seed + i) for i, c in enumerate("abcd")}
        state, _ = run_rounds(of_name(name, task), clients, 2)
        states.append(dict(take_apart(state).tensors))
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)


def test_other_methods_are_refused() -> None:
    assert {"fedavg", "knn_per", "fedprox", "fedper", "fedbabu"} <= {*SENDING_GRADIENTS}
    section = {"example_privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0}}
    known = experiment_catalogue()
    experiment = load_experiment(document("fedprox", training=section), known)
    assert from_json(to_json(experiment), known) == experiment
    refused(
        document("fedrep", training=section),
        "training.example_privacy",
        "found it with FedRep, expected a method with updates from one training",
    )
    of_clients = {"privacy": {"clip_norm": 1.0, "noise_multiplier": 1.0}}
    refused(
        document(training=section, **of_clients),
        "training.example_privacy",
        "found it with the section privacy",
    )
    balanced = section | {"class_weights": "balanced"}
    refused(document(training=balanced), "training.class_weights", "label counts")


def test_own_client_half_is_not_private_unless_stated() -> None:
    class Sends(Personalizer):
        def client_update(self, *arguments: Any) -> Any:
            return super().client_update(*arguments)

    class Stated(Sends):
        sends_gradients_only = True

    kinds: list[type[Method]] = [KnnMemory, Sends, Stated]
    assert [kind.sends_gradients_only for kind in kinds] == [True, False, True]


def test_batch_norm_is_refused_with_the_reason_of_opacus() -> None:
    message = "BatchNorm cannot support training with differential privacy. Expected"
    with pytest.raises(ConfigError, match=message):
        task_of_model(name="tiny_cnn", norm="batch")
    task_of_model(name="tiny_cnn", norm="batch", trained="head")


def test_fine_tuning_at_the_client_is_not_noisy() -> None:
    tuned = []
    for noise in (0.0, 100.0):
        task = plain_task(private(NEVER, noise, batch_size=9, learning_rate=0.1))
        method = of_name("fedbabu", task)
        state = method.init(["a"], KEY)
        payload = method.broadcast(state, "a", KEY)
        predictor: Any = method.personalize(payload, None, noisy(9, 3, 1), KEY)
        tuned.append(predictor.weights)
    assert torch.equal(*tuned)


def test_epsilon_is_that_of_dp_accounting() -> None:
    training = private(1.0, 1.1, batch_size=256)
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            256 / 60000, dp_accounting.GaussianDpEvent(1.1)
        ),
        14062,
    )
    accountant = dp_accounting.rdp.RdpAccountant()
    delta = 60000**-1.1
    expected = accountant.compose(event).get_epsilon(delta)
    spent = epsilon_of_examples(training, 60000, 14062)
    assert spent == pytest.approx((expected, delta))
    # A client with fewer examples than a mini-batch is always sampled.
    alone, _ = epsilon_of_examples(training, 20, 1)
    assert alone > epsilon_of_examples(training, 2000, 1)[0]
    assert epsilon_of_examples(private(1.0, 0.0), 20, 1)[0] == math.inf
