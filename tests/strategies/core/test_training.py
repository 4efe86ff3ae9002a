"""The one loop of local training: steps, parts, proximal terms, what is served."""

import copy
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import ClientData, Examples, InputSpec, no_examples
from knnper.experiment import SgdSettings, TrainingSettings
from knnper.flat_model import FlatModel
from knnper.seeding import RandomKey
from knnper.settings import Choice
from knnper.strategies.catalogue import METHODS
from knnper.strategies.core import training as module_of_local_sgd
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import UNSEEN_CLIENT
from knnper.strategies.core.optimizers import Sgd
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.proximal import pull
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalResult, cross_entropy, local_sgd
from knnper.strategies.ditto import DittoSettings
from tests.strategies.method_checks import count_embeddings
from tests.strategies.tiny import (
    FOUR_PIXELS,
    KEY,
    LinearModel,
    linear_task,
    noisy,
    normed_task,
    task_of,
    white,
)


def trained(
    task: Task,
    examples: Examples,
    rate: float = 0.1,
    rng: RandomKey = KEY,
    **given: Any,
) -> LocalResult:
    """Return what local training makes of the task's initial weights."""
    return local_sgd(task, task.initial_weights, examples, rate, rng, **given)


def same(first: LocalResult, second: LocalResult) -> bool:
    return torch.equal(first.weights, second.weights) and (
        first.num_steps == second.num_steps and first.train_loss == second.train_loss
    )


def test_equals_a_plain_loop() -> None:
    training = TrainingSettings(
        local_epochs=3, batch_size=4, momentum=0.9, weight_decay=0.1
    )
    task, train = normed_task(training), noisy(10, 0, seed=1).train
    task.model.load(task.initial_weights)
    module = copy.deepcopy(task.model.module)
    shuffler = KEY.child("batches").numpy()
    for parameter in module.parameters():
        parameter.grad = None
    optimizer = torch.optim.SGD(
        module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1
    )
    losses = []
    for _ in range(3):
        order = torch.from_numpy(shuffler.permutation(10))
        for positions in (order[:4], order[4:8]):
            batch = train.take(positions)
            optimizer.zero_grad()
            logits = module(task.normalize(batch.images))
            loss = functional.cross_entropy(logits, batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    result = trained(task, train, 0.05)
    torch.testing.assert_close(result.weights, FlatModel(module).read())
    assert result.num_steps == 6
    assert result.train_loss == pytest.approx(sum(losses) / 6)


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "settings"),
    [
        (0.0, 0.1, SgdSettings()),
        (0.9, 0.0, SgdSettings(dampening=0.3)),
        (0.9, 0.1, SgdSettings(nesterov=True)),
    ],
)
def test_steps_are_those_of_torch(
    momentum: float, weight_decay: float, settings: SgdSettings
) -> None:
    training = TrainingSettings(
        momentum=momentum, weight_decay=weight_decay, optimizer=Choice("SGD", settings)
    )
    weights, reference = (
        [torch.ones(3, requires_grad=True) for _ in range(2)] for _ in range(2)
    )
    sgd = Sgd(normed_task(training), weights, 0.05)
    other = torch.optim.SGD(
        reference,
        lr=0.05,
        momentum=momentum,
        weight_decay=weight_decay,
        fused=True,
        **vars(settings),
    )
    for number in range(1, 5):
        for tensors in (weights, reference):
            tensors[0].grad = torch.arange(3.0) / number
            tensors[1].grad = None if number == 3 else torch.arange(3.0) * number
        sgd.step()
        other.step()
        assert all(map(torch.equal, weights, reference))


def test_nothing_is_imported_that_torch_compiles_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    assert trained(normed_task(), noisy(10, 0, seed=1).train, 0.05).num_steps > 0


class Gated(LinearModel):
    """A linear model of which a part joins where the first pixel is bright."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__(spec)
        self.gated = nn.Linear(self.embedding_dim, self.embedding_dim)

    def embed(self, x: Tensor) -> Tensor:
        plain = super().embed(x)
        return self.gated(plain) if plain[0, 0] > 0.5 else plain


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.1)])
def test_gradients_apart_train_as_one_vector_of_them(
    momentum: float, weight_decay: float
) -> None:
    spec = dataclasses.replace(FOUR_PIXELS, mean=(0.0,), std=(1.0,))
    training = TrainingSettings(
        local_epochs=4, batch_size=1, momentum=momentum, weight_decay=weight_decay
    )
    task, train = task_of(lambda: Gated(spec), spec, training), noisy(7, 0, 1).train
    bright = train.images[:, 0, 0, 0] > 127
    assert bright.any()  # some steps need a part of the network,
    assert not bright.all()  # which others leave alone: momentum and decay go on

    def alone(gradient: Tensor, parameters: Tensor) -> None:
        """Ask for all gradients as one vector."""

    apart, of_vector = trained(task, train), trained(task, train, gradient_hook=alone)
    assert same(apart, of_vector)
    assert not torch.equal(apart.weights, task.initial_weights)
    task.model.gradient.fill_(1.0)  # the tensors' gradients are its parts again
    for tensor in task.model.tensors:
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.ones_like(tensor))


def batches_of(task: Task, num_examples: int, num_epochs: int) -> list[list[int]]:
    """Return the examples that each step trains on.

    Example i lights pixel i only, so it alone moves column i of the gradient.
    """
    images = (255 * torch.eye(num_examples)).to(torch.uint8)
    examples = Examples(
        images.reshape(num_examples, 1, num_examples, 1),
        torch.zeros(num_examples, dtype=torch.int64),
    )
    batches: list[list[int]] = []

    def record(gradient: Tensor, parameters: Tensor) -> None:
        moved = gradient.reshape(2, num_examples)[0].nonzero().flatten()
        batches.append(moved.tolist())
        gradient.zero_()

    trained(task, examples, num_epochs=num_epochs, gradient_hook=record)
    return batches


@settings(max_examples=30, deadline=None)
@given(num=st.integers(1, 12), size=st.integers(1, 6), epochs=st.integers(0, 3))
def test_an_epoch_takes_every_example_at_most_once(
    num: int, size: int, epochs: int
) -> None:
    task = linear_task(batch_size=size, num_pixels=num)
    per_epoch = max(1, num // size)
    batches = batches_of(task, num, epochs)
    assert len(batches) == epochs * per_epoch
    assert {len(batch) for batch in batches} <= {min(size, num)}
    for start in range(0, len(batches), per_epoch):
        positions = list(itertools.chain(*batches[start : start + per_epoch]))
        assert len(set(positions)) == min(size, num) * per_epoch


@pytest.mark.parametrize(
    ("training", "num_epochs", "steps"),
    [
        (TrainingSettings(batch_size=2), None, 3),
        (TrainingSettings(batch_size=2, local_epochs=2), None, 6),
        (TrainingSettings(batch_size=2, local_steps=4), None, 4),
        (TrainingSettings(batch_size=2, local_steps=1), None, 1),
        (TrainingSettings(batch_size=2, local_steps=4), 1, 3),
        (TrainingSettings(batch_size=2, local_epochs=2), 0, 0),
    ],
)
def test_length_of_the_training(
    training: TrainingSettings, num_epochs: int | None, steps: int
) -> None:
    task, train = linear_task(training), white([0, 1, 0, 1, 0, 1]).train
    result = trained(task, train, num_epochs=num_epochs)
    assert result.num_steps == steps


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, (4, 8.0)),  # two of ten are left out of two epochs of the same order
        ([1.0] * 10, (4, 8.0)),
        ([1.0] + [0.0] * 9, (4, 1.0)),
        ([0.0] * 10, (4, 0.0)),
        ([1.0, 1.0, 2.0] + [0.0] * 5 + [9.0] * 2, (4, 16 / 6)),
    ],
)
def test_callback_reports_what_was_trained_on(
    monkeypatch: pytest.MonkeyPatch,
    weights: list[float] | None,
    expected: tuple[int, float],
) -> None:
    def same_order(*_: object) -> Iterator[Tensor]:
        return itertools.cycle([torch.arange(0, 4), torch.arange(4, 8)])

    monkeypatch.setattr(module_of_local_sgd, "mini_batches", same_order)
    calls: list[tuple[int, float]] = []
    task = dataclasses.replace(
        normed_task(local_epochs=2, batch_size=4),
        on_trained=lambda *arguments: calls.append(arguments),
    )
    factors = None if weights is None else torch.tensor(weights)
    examples = noisy(10, 0, seed=1).train
    trained(task, examples, 0.05, example_weights=factors)
    assert calls == [expected]


def test_without_examples_nothing_is_done() -> None:
    task = linear_task(local_steps=5)
    start = torch.tensor([1.0, 2.0])
    result = local_sgd(task, start, no_examples(task.spec), 0.1, KEY)
    assert torch.equal(result.weights, start)
    assert result.num_steps == 0
    assert math.isnan(result.train_loss)


def test_the_key_alone_decides_and_the_global_generator_is_left_alone() -> None:
    task = normed_task(batch_size=2)
    task.model.module.features.append(nn.Dropout(0.5))  # type: ignore[operator]
    train = noisy(8, 0, seed=4).train
    before = torch.get_rng_state()
    first = trained(task, train)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert same(first, trained(task, train))
    assert not same(first, trained(task, train, 0.1, KEY.child("other")))


def test_batches_are_augmented_with_the_keys_numbers() -> None:
    """One image, its left pixel white: the gradient shows which pixel was seen."""
    training = TrainingSettings(local_steps=40, augmentation="flip")
    task = linear_task(training, num_pixels=2)
    images = torch.tensor([255, 0], dtype=torch.uint8).reshape(1, 1, 2, 1)
    seen: list[bool] = []

    def record(gradient: Tensor, parameters: Tensor) -> None:
        left, right = gradient.reshape(2, 2)[0].tolist()
        assert (left == 0) != (right == 0)
        seen.append(right != 0)
        gradient.zero_()

    examples = Examples(images, torch.zeros(1, dtype=torch.int64))
    trained(task, examples, gradient_hook=record)
    draws = KEY.child("augmentation").numpy()
    assert seen == [bool(draws.integers(0, 2, 1)) for _ in range(40)]
    assert 0 < sum(seen) < 40


def test_training_in_bfloat16_is_close_to_float32() -> None:
    training = TrainingSettings(local_epochs=3, batch_size=4, momentum=0.9)
    task, train = normed_task(training), noisy(16, 0, seed=6).train
    halved = dataclasses.replace(training, precision="bfloat16")
    mixed_task = dataclasses.replace(task, training=halved)
    start = task.initial_weights
    exact = trained(task, train, 0.05)
    mixed = local_sgd(mixed_task, start, train, 0.05, KEY)
    assert mixed.weights.dtype == torch.float32
    assert not torch.equal(mixed.weights, exact.weights)
    # bfloat16 has 8 bits of mantissa: relative errors of 2^-8 in each product.
    moved = torch.linalg.vector_norm(exact.weights - start)
    gap = torch.linalg.vector_norm(mixed.weights - exact.weights)
    assert float(gap / moved) < 0.05
    assert mixed.train_loss == pytest.approx(exact.train_loss, rel=0.02)
    assert same(mixed, local_sgd(mixed_task, start, train, 0.05, KEY))


def test_of_the_head_alone_the_body_is_passed_once() -> None:
    task = normed_task(batch_size=4, local_epochs=5, momentum=0.9)
    passed, examples = count_embeddings(task), noisy(13, 0, seed=1).train
    weights = trained(task, examples, trainable=task.head_mask).weights
    assert passed == [13]
    # Another name for the same objective: the way that passes each mini-batch.
    options: dict[str, Any] = {"objective": lambda *given: cross_entropy(*given)}
    slowly = trained(task, examples, trainable=task.head_mask, **options).weights
    assert passed == [13, *(15 * [4])]
    torch.testing.assert_close(weights, slowly)


NUMBERS = st.floats(-5, 5, width=32)


def pulled(
    gradient: Tensor,
    parameters: Tensor,
    center: Tensor,
    weight: float,
    rate: float,
    decay: float,
) -> Tensor:
    changed = gradient.clone()
    pull(center, weight, rate, decay)(changed, parameters)
    return changed


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        # (g + λ (p - c)) / (1 + η λ) = (2 + ½ · (3 - 1)) / (1 + 2 · ½) = 1.5: the step
        # ends at 3 - 2 · 1.5 = 0 = (p - η g + η λ c) / (1 + η λ) = (3 - 4 + 1) / 2.
        (0.0, 1.5),
        # With d = ¼ the loss has the slope 2 + ¼ · 3 = 2.75, and the step is along
        # (2.75 + ½ · (3 - 1)) / 2 = 1.875, of which SGD adds ¼ · 3 itself.
        (0.25, 1.875 - 0.75),
    ],
)
def test_a_step_by_hand(decay: float, expected: float) -> None:
    g, p, c = (torch.tensor([value]) for value in (2.0, 3.0, 1.0))
    assert pulled(g, p, c, 0.5, 2, decay).tolist() == [expected]


@settings(max_examples=30, deadline=None)
@given(
    gradient=NUMBERS,
    parameter=NUMBERS,
    center=NUMBERS,
    weight=st.floats(0, 30),
    rate=st.floats(0.01, 3),
    decay=st.floats(0, 1),
)
def test_a_step_ends_at_the_minimum(
    gradient: float,
    parameter: float,
    center: float,
    weight: float,
    rate: float,
    decay: float,
) -> None:
    g, p, c = (torch.tensor([value]) for value in (gradient, parameter, center))
    end = p - rate * (pulled(g, p, c, weight, rate, decay) + decay * p)
    # The slope of ⟨g + d p, q⟩ + (q - p)² / (2 η) + λ/2 (q - c)² at q = end.
    slope = g + decay * p + (end - p) / rate + weight * (end - c)
    scale = abs(gradient) + (abs(parameter) + abs(center)) * (1 / rate + weight) + 1
    assert abs(float(slope)) < 1e-5 * scale


def test_buffers_of_the_center_are_left_out() -> None:
    training = TrainingSettings(batch_size=3, local_epochs=4, weight_decay=0.2)
    task = normed_task(training)
    assert len(task.initial_weights) > task.model.num_parameters
    examples, start, rate = noisy(6, 0, seed=1).train, task.initial_weights, 0.1
    everything = torch.ones(len(start), dtype=torch.bool)
    hook = pull(start, 1e30, rate, 0.2, everything)
    result = local_sgd(task, start, examples, rate, RandomKey(1), gradient_hook=hook)
    kept = slice(0, task.model.num_parameters)
    torch.testing.assert_close(result.weights[kept], start[kept])
    assert not torch.equal(result.weights[kept.stop :], start[kept.stop :])


TRAINING = TrainingSettings(num_rounds=2, batch_size=3, learning_rate=0.1)


def test_without_validation_data_it_trains_once() -> None:
    task, trained_on = linear_task(TRAINING), []

    def train(examples: Examples) -> ModelPredictor:
        trained_on.append(len(examples))
        return ModelPredictor(task, torch.full((2,), float(len(examples))))

    model = on_both_splits(white([0, 1, 1], [0]), train)
    assert trained_on == [4]
    assert model.without_validation().weights.tolist() == [3.0, 3.0]
    assert model.without_validation().without_validation().weights[0] == 3.0
    trained_on.clear()
    model = on_both_splits(white([0, 1, 1]), train)
    assert model.without_validation() is model
    assert trained_on == [3]


@pytest.mark.parametrize(
    "name",
    [
        *("apfl", "ditto", "fed_mtl", "fedas", "fedbabu", "fedbn", "fedpac"),
        *("fedper", "fedrep", "fedrod", "l2gd", "lg_fedavg", "pfedme"),
    ],
)
def test_unseen_clients_of_all_methods_learn_from_the_same_data(name: str) -> None:
    task, data = normed_task(TRAINING), noisy(6, 4, seed=1)
    settings = (
        DittoSettings((0.1,)) if name == "ditto" else METHODS[name].settings_type()
    )
    method = METHODS[name](task, settings)
    state = method.init(("a",), RandomKey(1))
    payload = method.broadcast(state, UNSEEN_CLIENT, RandomKey(2))
    nothing = no_examples(task.spec)

    def served(data: ClientData) -> ModelPredictor:
        predictor = method.personalize(payload, None, data, RandomKey(3))
        assert isinstance(predictor, ModelPredictor)
        return predictor

    model = served(data)
    both = served(ClientData(data.train_and_validation(), nothing))
    assert torch.equal(model.weights, both.weights)
    alone = served(ClientData(data.train, nothing))
    assert torch.equal(model.without_validation().weights, alone.weights)
    assert not torch.equal(model.weights, alone.weights)
    assert model.without_validation().describe() == alone.describe()
