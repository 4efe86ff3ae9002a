"""Mapper, jointly and in two stages: by hand, both ends of λ, its choice, its cost."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from knnper.data.examples import ClientData, Examples, no_examples
from knnper.experiment import TrainingSettings
from knnper.seeding import RandomKey
from knnper.strategies import mapper
from knnper.strategies.core.method import Method
from knnper.strategies.core.predictors import MixturePredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd
from tests.strategies.tiny import (
    KEY,
    TEXT,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    text_task,
    topped,
    white,
)

SIGMA = 0.6224593  # σ(½), p(0) where the logits are (¼, -¼)

EVERYTHING = TrainingSettings(
    batch_size=3, learning_rate=0.1, momentum=0.9, weight_decay=0.01, num_rounds=2
)


def joint(task: Task, share: float) -> mapper.Mapper:
    return mapper.Mapper(task, mapper.MapperSettings((share,), warm_start_fraction=0.0))


def mixture_served(
    method: Method, weights: torch.Tensor, data: ClientData
) -> MixturePredictor:
    """Return what an unseen client is served of one model that is sent to it."""
    payload = ModelPayload(weights)
    predictor = method.personalize(payload, None, data, RandomKey(6))
    assert isinstance(predictor, MixturePredictor)
    return predictor


def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return three windows, int64 (3, 5, 1, 1), and the characters behind them."""
    text = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 3, 1, 0, 2, 2], [1, 0, 0, 0, 0, 3]])
    return text[:, :5, None, None], text[:, 5]


def test_a_round_by_hand() -> None:
    task = linear_task(learning_rate=1.0)
    method = joint(task, 0.5)
    state, _ = run_rounds(method, {"a": white([0])}, num_rounds=1)
    # At h_l = h_c = 0 the mixture m = ½ p_l + ½ p_c is ½, and of the loss -log m
    # the slope in p_l is -½ / m = -1, that of p_l in its logits ±¼: h_l = (¼, -¼).
    # Then p_l = σ(½), m = ½ σ(½) + ¼, and h_c steps by ½ / m · ¼.
    step = 0.5 / (0.5 * SIGMA + 0.25) / 4
    assert state.weights.tolist() == pytest.approx([step, -step], abs=1e-6)


def test_what_is_served_by_hand() -> None:
    method = joint(linear_task(learning_rate=1.0), 0.5)
    mixture = mixture_served(method, torch.zeros(2), white([0]))
    central, local = mixture.components
    assert central.tolist() == [0.0, 0.0]
    assert local.tolist() == pytest.approx([0.25, -0.25], abs=1e-6)
    rows = mixture(white([0]).train.images)
    expected = [0.5 * SIGMA + 0.25, 0.75 - 0.5 * SIGMA]
    assert rows[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert mixture.describe() == {"interpolation_weight": 0.5}


@pytest.mark.parametrize(
    ("settings", "start", "expected"),
    [
        # A rate and a length of their own: ½ · ½, then ½ (1 - σ(½)).
        (
            {"local_epochs": 2, "local_learning_rate": 0.5},
            0.0,
            0.25 + 0.5 * (1 - SIGMA),
        ),
        # From the central model that was sent, where p(0) = σ(½).
        ({}, 0.25, 0.25 + 1 - SIGMA),
    ],
)
def test_local_models_by_hand(
    settings: dict[str, Any], start: float, expected: float
) -> None:
    method = mapper.Mapper(
        linear_task(learning_rate=1.0), mapper.MapperSettings((1.0,), **settings)
    )
    mixture = mixture_served(method, torch.tensor([start, -start]), white([0]))
    assert float(mixture.components[1][0]) == pytest.approx(expected, abs=1e-6)


def test_the_first_rounds_are_fedavgs() -> None:
    task = normed_task(replace(EVERYTHING, num_rounds=4))
    clients = {name: noisy(7 + i, 3, seed=i) for i, name in enumerate("abc")}
    settings = mapper.MapperSettings((0.5,), warm_start_fraction=0.5)
    for num_rounds, same in ((2, True), (3, False)):
        expected, _ = run_rounds(of_name("fedavg", task), clients, num_rounds)
        state, _ = run_rounds(mapper.Mapper(task, settings), clients, num_rounds)
        assert torch.equal(state.weights, expected.weights) == same


def test_a_central_model_without_a_part_is_returned_as_it_was_sent() -> None:
    task, data = normed_task(EVERYTHING), noisy(9, 4, seed=1)
    method = joint(task, 1.0)
    payload = ModelPayload(task.initial_weights)
    _, update = method.client_update(payload, None, data, 1, KEY)
    # Neither weight decay nor the statistics of BatchNorm have changed it.
    assert torch.equal(update.weights, task.initial_weights)


def test_the_fixed_model_gets_no_gradient() -> None:
    task, examples = normed_task(EVERYTHING), noisy(9, 0, seed=1).train
    fixed, trained_head = task.fresh_weights(KEY), task.model.module.classifier
    passes: dict[bool, list[tuple[bool, bool]]] = {True: [], False: []}
    ends: list[torch.Tensor] = []

    def record(head: torch.nn.Module, inputs: Any, logits: torch.Tensor) -> None:
        flags = (logits.requires_grad, head.training)
        passes[head is trained_head].append(flags)
        if head is not trained_head:
            ends.append(head.get_parameter("weight"))

    # The second model is a copy of the task's, and takes this over.
    with trained_head.register_forward_hook(record):
        objective = mapper.mixture_loss(task, 0.4, fixed)
        start = task.initial_weights
        local_sgd(task, start, examples, 0.1, KEY, objective=objective)
    assert passes == {True: 3 * [(True, True)], False: 3 * [(False, False)]}
    expected = task.model.named(fixed)["classifier.weight"]
    assert torch.equal(ends[-1].detach(), expected)


def test_the_loss_is_that_of_the_mixture_of_probabilities() -> None:
    task = linear_task()
    objective = mapper.mixture_loss(task, 0.25, torch.tensor([1.0, -1.0]))
    task.model.load(torch.tensor([-0.5, 0.5]))
    inputs, labels = torch.ones(2, 1, 1, 1), torch.tensor([0, 1])
    local, fixed = 1 - 0.7310586, 0.8807971  # σ(-1), σ(2)
    mixture = 0.25 * local + 0.75 * fixed
    expected = -torch.tensor([mixture, 1 - mixture]).log()
    loss = objective(task.model.module, inputs, labels)
    torch.testing.assert_close(loss.detach(), expected)


def test_each_position_of_a_text_has_a_mixture_of_its_own() -> None:
    task = text_task(hidden_dim=6, learning_rate=0.1)
    local, fixed = task.initial_weights, task.fresh_weights(RandomKey(8))
    inputs, labels = windows()
    text = torch.cat([inputs.flatten(start_dim=1), labels[:, None]], dim=1)

    def probabilities(weights: torch.Tensor) -> torch.Tensor:
        """Return what each prefix of a window gives its next character, (n, T)."""
        task.model.load(weights)
        columns = []
        for length in range(1, 6):
            logits = task.model.module(inputs[:, :length]).detach()
            rows = torch.softmax(logits, dim=1)
            columns.append(rows.gather(1, text[:, length : length + 1])[:, 0])
        return torch.stack(columns, dim=1)

    mixture = 0.25 * probabilities(local) + 0.75 * probabilities(fixed)
    objective = mapper.mixture_loss(task, 0.25, fixed)
    task.model.load(local)
    loss = objective(task.model.module, inputs, labels).detach()
    torch.testing.assert_close(loss, -mixture.log().mean(dim=1))


def test_a_central_model_without_a_part_reports_what_training_minimises() -> None:
    task, (inputs, labels) = text_task(hidden_dim=6, learning_rate=0.1), windows()
    given = Examples(inputs.to(torch.uint8), labels)
    data = ClientData(given, no_examples(TEXT))
    method = joint(task, 1.0)
    payload, rng = ModelPayload(task.initial_weights), RandomKey(6)
    _, update = method.client_update(payload, None, data, 1, rng)
    local = local_sgd(
        task, payload.weights, given, 0.1, rng.child("local"), num_epochs=1
    )
    losses = task.losses(local.weights, given)
    assert update.train_loss == pytest.approx(float(losses.mean()))


PAIRS = (mapper.Pair(0.0, torch.zeros(2)), mapper.Pair(1.0, torch.tensor([1.0, -1.0])))


@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [([0], [0], 1.0), ([0], [1], 0.0), ([0], [], 1.0), ([1], [], 0.0)],
)
def test_on_validation_and_else_on_the_training_split(
    train: list[int], validation: list[int], expected: float
) -> None:
    task = linear_task()
    data = white(train, validation)
    pair = mapper.best_pair(task, torch.zeros(2), PAIRS, data)
    assert pair.interpolation_weight == expected


def test_of_equals_the_first() -> None:
    task, same = linear_task(), torch.zeros(2)
    pairs = [mapper.Pair(0.0, same), mapper.Pair(0.5, same), mapper.Pair(1.0, same)]
    assert mapper.best_pair(task, same, pairs, white([0])) is pairs[0]


def test_without_training_data_the_central_model() -> None:
    task, central = linear_task(), torch.tensor([0.3, 0.1])
    pair = mapper.best_pair(task, central, PAIRS[1:], white([], [0]))
    assert pair.interpolation_weight == 0.0
    assert pair.local is central


def test_the_mixture_may_be_best() -> None:
    task = linear_task()
    central, local = torch.tensor([2.0, -2.0]), torch.tensor([-2.0, 2.0])
    pairs = [mapper.Pair(share, local) for share in (0.0, 0.5, 1.0)]
    pair = mapper.best_pair(task, central, pairs, white([0], [0, 1]))
    assert pair.interpolation_weight == 0.5


def two_stage(task: Task, *cover: float) -> Method:
    settings = mapper.TwoStageSettings(cover or (0.0, 0.5, 1.0), local_epochs=2)
    return mapper.TwoStageMapper(task, of_name("fedavg", task), settings)


def test_by_hand() -> None:
    task = linear_task(learning_rate=0.5)
    mixture = mixture_served(two_stage(task, 0.3), torch.zeros(2), white([0]))
    central, local = mixture.components
    # The local model's own loss, whatever λ is: ½ · ½, then ½ (1 - σ(½)).
    expected = 0.25 + 0.5 * (1 - SIGMA)
    assert central.tolist() == [0.0, 0.0]
    assert float(local[0]) == pytest.approx(expected, abs=1e-6)
    assert mixture.mixture_weights.tolist() == pytest.approx([0.7, 0.3])


def test_no_weight_is_the_method() -> None:
    task, data = normed_task(EVERYTHING), noisy(9, 4, seed=1)
    mixture = mixture_served(two_stage(task, 0.0), task.initial_weights, data)
    queries = noisy(5, 0, seed=9).train.images
    expected = task.probabilities(task.initial_weights, queries)
    assert torch.equal(mixture(queries), expected)


def test_all_weight_is_fine_tuning() -> None:
    task, data = normed_task(EVERYTHING), noisy(9, 4, seed=1)
    mixture = mixture_served(two_stage(task, 1.0), task.initial_weights, data)
    tuned = topped("fine_tuning", task, num_epochs=2)
    payload = ModelPayload(task.initial_weights)
    expected = tuned.personalize(payload, None, data, RandomKey(6))
    queries = noisy(5, 0, seed=9).train.images
    assert torch.equal(mixture(queries), expected(queries))


def test_the_choice_has_not_seen_validation() -> None:
    task = linear_task(learning_rate=5.0, batch_size=1)
    # Trained on both splits, the local model knows the validation label best.
    data = white([0], [1] * 9)
    mixture = mixture_served(two_stage(task, 0.0, 1.0), torch.zeros(2), data)
    assert mixture.describe() == {"interpolation_weight": 0.0}
    before, after = mixture.without_validation(), mixture
    assert float(before.components[1][0]) > 0 > float(after.components[1][0])
    assert before.without_validation() is before


def test_on_top_of_what_was_trained_on_validation() -> None:
    task, data = normed_task(EVERYTHING), noisy(9, 4, seed=1)
    tuned = topped("fine_tuning", task, num_epochs=1)
    method = mapper.TwoStageMapper(task, tuned, mapper.TwoStageSettings((0.5,)))
    payload = ModelPayload(task.initial_weights)
    base = one_model_of(tuned, payload, None, data, RandomKey(6))
    mixture = mixture_served(method, task.initial_weights, data)
    assert torch.equal(mixture.components[0], base.weights)
    alone = mixture.without_validation()
    assert torch.equal(alone.components[0], base.without_validation().weights)


@pytest.mark.parametrize("num_validation", [4, 0])
@pytest.mark.parametrize("num_first", [2, 1], ids=["joint", "two"])
def test_without_validation_data_nothing_is_retrained(
    num_first: int, num_validation: int
) -> None:
    sizes, data = list[float](), noisy(9, num_validation, seed=1)
    task = normed_task(EVERYTHING)
    task = replace(task, on_trained=lambda _, number: sizes.append(number))
    both = mapper.Mapper(task, mapper.MapperSettings((0.5, 1.0)))
    method = both if num_first == 2 else two_stage(task)
    mixture = mixture_served(method, task.initial_weights, data)
    assert [size > 9 for size in sizes] == [False] * num_first + [True][:num_validation]
    assert (mixture.without_validation() is mixture) == (num_validation == 0)
