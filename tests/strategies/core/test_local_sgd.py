import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import Examples, no_examples
from knnper.experiment import TrainingSettings
from knnper.models.flat import FlatModel
from knnper.seeding import RandomKey
from knnper.strategies.core import training as module_of_local_sgd
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalResult, local_sgd
from tests.strategies.trained_methods import MakeClient, MakeTask


def same(first: LocalResult, second: LocalResult) -> bool:
    return torch.equal(first.weights, second.weights) and (
        first.num_steps == second.num_steps and first.train_loss == second.train_loss
    )


def test_equals_a_plain_loop(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    training = TrainingSettings(
        local_epochs=3, batch_size=4, momentum=0.9, weight_decay=0.1
    )
    task, train = normed_task(training), noisy(10, 0, seed=1).train
    task.model.load(task.initial_weights)
    module = copy.deepcopy(task.model.module)
    shuffler = key.child("batches").numpy()
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

    result = local_sgd(task, task.initial_weights, train, 0.05, key)

    torch.testing.assert_close(result.weights, FlatModel(module).read())
    assert result.num_steps == 6
    assert result.train_loss == pytest.approx(sum(losses) / 6)


def test_one_step_by_hand(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings())
    result = local_sgd(task, torch.zeros(2), white([0]).train, 0.5, key)
    # x = 1, p = (½, ½), label 0: gradient (½ - 1, ½); step 0.5 times that; loss ln 2.
    assert torch.equal(result.weights, torch.tensor([0.25, -0.25]))
    assert result.num_steps == 1
    assert result.train_loss == pytest.approx(math.log(2))


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

    start = torch.zeros(2 * num_examples)
    key = RandomKey(5)
    local_sgd(
        task, start, examples, 0.1, key, num_epochs=num_epochs, gradient_hook=record
    )
    return batches


def test_the_incomplete_last_batch_is_left_out(linear_task: MakeTask) -> None:
    task = linear_task(TrainingSettings(batch_size=2), num_pixels=5)
    assert [len(batch) for batch in batches_of(task, 5, num_epochs=2)] == [2, 2, 2, 2]


# The factory that the fixture returns keeps nothing from one example to the next.
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(num=st.integers(1, 12), size=st.integers(1, 6), epochs=st.integers(0, 3))
def test_an_epoch_takes_every_example_at_most_once(
    linear_task: MakeTask, num: int, size: int, epochs: int
) -> None:
    task = linear_task(TrainingSettings(batch_size=size), num_pixels=num)
    per_epoch = max(1, num // size)
    batches = batches_of(task, num, epochs)
    assert len(batches) == epochs * per_epoch
    for start in range(0, len(batches), per_epoch):
        taken = list(itertools.chain(*batches[start : start + per_epoch]))
        assert len(set(taken)) == min(size, num) * per_epoch


def test_epochs_are_shuffled_anew(linear_task: MakeTask) -> None:
    task = linear_task(TrainingSettings(batch_size=1), num_pixels=10)
    batches = batches_of(task, 10, num_epochs=2)
    assert batches[:10] != batches[10:]


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
    linear_task: MakeTask,
    white: MakeClient,
    key: RandomKey,
    training: TrainingSettings,
    num_epochs: int | None,
    steps: int,
) -> None:
    task, train = linear_task(training), white([0, 1, 0, 1, 0, 1]).train
    result = local_sgd(
        task, task.initial_weights, train, 0.1, key, num_epochs=num_epochs
    )
    assert result.num_steps == steps


def test_the_hook_changes_the_gradient_and_sees_the_parameters(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings(local_steps=2))
    seen: list[Tensor] = []

    def pull_to_zero(gradient: Tensor, parameters: Tensor) -> None:
        seen.append(parameters.clone())
        gradient.copy_(parameters)

    start = torch.tensor([4.0, 8.0])
    result = local_sgd(
        task, start, white([0]).train, 0.5, key, gradient_hook=pull_to_zero
    )
    # Each step halves the weights: w - 0.5 w.
    assert [found.tolist() for found in seen] == [[4.0, 8.0], [2.0, 4.0]]
    assert result.weights.tolist() == [1.0, 2.0]


def test_weights_of_one_change_no_bit(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task = normed_task(TrainingSettings(local_epochs=2, batch_size=3))
    train, start = noisy(8, 0, seed=2).train, task.initial_weights
    plain = local_sgd(task, start, train, 0.1, key)
    ones = local_sgd(task, start, train, 0.1, key, example_weights=torch.ones(8))
    assert same(plain, ones)


def test_example_weights_scale_each_examples_loss(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings())
    factors = torch.tensor([0.5, 0.0])
    result = local_sgd(
        task, torch.zeros(2), white([0, 1]).train, 1.0, key, example_weights=factors
    )
    # Gradient (0.5 · (-½, ½) + 0 · (½, -½)) / 2 = (-⅛, ⅛); loss 0.5 ln 2 / 2.
    assert result.weights.tolist() == [0.125, -0.125]
    assert result.train_loss == pytest.approx(math.log(2) / 4)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, (4, 8.0)),  # two of ten are left out of two epochs of the same order
        ([1.0] * 10, (4, 8.0)),
        ([1.0] + [0.0] * 9, (4, 1.0)),
        ([0.0] * 10, (4, 0.0)),
    ],
)
def test_what_was_trained_on_is_told(
    normed_task: MakeTask,
    noisy: MakeClient,
    key: RandomKey,
    monkeypatch: pytest.MonkeyPatch,
    weights: list[float] | None,
    expected: tuple[int, float],
) -> None:
    def same_order(*_: object) -> Iterator[Tensor]:
        return itertools.cycle([torch.arange(0, 4), torch.arange(4, 8)])

    monkeypatch.setattr(module_of_local_sgd, "mini_batches", same_order)
    told: list[tuple[int, float]] = []
    task = dataclasses.replace(
        normed_task(TrainingSettings(local_epochs=2, batch_size=4)),
        on_trained=lambda *found: told.append(found),
    )
    factors = None if weights is None else torch.tensor(weights)
    examples = noisy(10, 0, seed=1).train
    start = task.initial_weights
    local_sgd(task, start, examples, 0.05, key, example_weights=factors)
    assert told == [expected]


def test_who_outweighs_the_others_counts_for_more() -> None:
    visited, weights = torch.tensor([True] * 3 + [False]), torch.tensor([1.0, 1, 2, 9])
    number = module_of_local_sgd._effective_number(visited, weights)
    assert number == pytest.approx(16 / 6)


def test_without_examples_nothing_is_done(
    linear_task: MakeTask, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings(local_steps=5))
    start = torch.tensor([1.0, 2.0])
    result = local_sgd(task, start, no_examples(task.spec), 0.1, key)
    assert torch.equal(result.weights, start)
    assert result.num_steps == 0
    assert math.isnan(result.train_loss)


def test_a_batch_of_one_under_batch_norm(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task = normed_task(TrainingSettings())
    result = local_sgd(task, task.initial_weights, noisy(1, 0, seed=3).train, 0.1, key)
    assert math.isfinite(result.train_loss)
    assert bool(result.weights.isfinite().all())


def test_the_key_alone_decides_and_the_global_generator_is_left_alone(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    task = normed_task(TrainingSettings(batch_size=2))
    task.model.module.features.append(nn.Dropout(0.5))  # type: ignore[operator]
    train, start = noisy(8, 0, seed=4).train, task.initial_weights
    before = torch.get_rng_state()
    first = local_sgd(task, start, train, 0.1, key)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert same(first, local_sgd(task, start, train, 0.1, key))
    assert not same(first, local_sgd(task, start, train, 0.1, key.child("other")))


def test_batches_are_augmented_with_the_keys_numbers(
    linear_task: MakeTask, key: RandomKey
) -> None:
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
    start = torch.zeros(4)
    local_sgd(task, start, examples, 0.1, key, gradient_hook=record)
    draws = key.child("augmentation").numpy()
    assert seen == [bool(draws.integers(0, 2, 1)) for _ in range(40)]
    assert 0 < sum(seen) < 40


def test_training_in_bfloat16_is_close_to_float32(
    normed_task: MakeTask, noisy: MakeClient, key: RandomKey
) -> None:
    training = TrainingSettings(local_epochs=3, batch_size=4, momentum=0.9)
    task, train = normed_task(training), noisy(16, 0, seed=6).train
    halved = dataclasses.replace(training, precision="bfloat16")
    mixed_task = dataclasses.replace(task, training=halved)
    start = task.initial_weights
    exact = local_sgd(task, start, train, 0.05, key)
    mixed = local_sgd(mixed_task, start, train, 0.05, key)
    assert mixed.weights.dtype == torch.float32
    assert not torch.equal(mixed.weights, exact.weights)
    # bfloat16 has 8 bits of mantissa: relative errors of 2^-8 in each product.
    moved = torch.linalg.vector_norm(exact.weights - start)
    gap = torch.linalg.vector_norm(mixed.weights - exact.weights)
    assert float(gap / moved) < 0.05
    assert mixed.train_loss == pytest.approx(exact.train_loss, rel=0.02)
    assert same(mixed, local_sgd(mixed_task, start, train, 0.05, key))


def test_the_given_weights_stay_as_they_are(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task, start = linear_task(TrainingSettings()), torch.zeros(2)
    local_sgd(task, start, white([0, 1, 1]).train, 0.1, key)
    assert torch.equal(start, torch.zeros(2))
