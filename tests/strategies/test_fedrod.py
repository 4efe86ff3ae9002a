"""FedRoD: rounds by hand, two heads that leave each other alone, and their sum."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from knnper.data.examples import ClientData, Examples
from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.flat_model import FlatModel
from knnper.strategies.core.evaluation import evaluate
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelPayload
from knnper.strategies.core.sharing import PersonalPart
from knnper.strategies.fedrod import FedRoD, FedRoDSettings
from tests.strategies.tiny import (
    FOUR_PIXELS,
    KEY,
    NormedModel,
    linear_task,
    noisy,
    normed_task,
    of_name,
    one_model_of,
    run_rounds,
    text_task,
    topped,
    two_weights_task,
    white,
)

SIGMA_1 = 0.73105858  # σ(1)
TRAINING = TrainingSettings(
    num_rounds=3, batch_size=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01
)


def test_two_rounds_by_hand() -> None:
    method = of_name("fedrod", linear_task(learning_rate=1.0))
    clients = {"a": white([0, 0, 1]), "b": white([0])}
    state, memory = run_rounds(method, clients, num_rounds=1)
    # The balanced softmax of client a is (⅔, ⅓) where G = 0, as are its labels; that of
    # b has one class. G stays 0. P: softmax (½, ½), so the gradients are ½ - ⅔, ½ - 1.
    assert state.weights.tolist() == pytest.approx([0, 0], abs=1e-6)
    assert memory["a"].personal.tolist() == pytest.approx([1 / 6, -1 / 6], abs=1e-6)
    assert memory["b"].personal.tolist() == pytest.approx([0.5, -0.5], abs=1e-6)
    _, memory = run_rounds(method, clients, num_rounds=2)
    # From P itself: a's softmax is σ(⅓), b's σ(1).
    personal = 1 / 6 + 2 / 3 - 1 / (1 + math.exp(-1 / 3))
    assert memory["a"].personal.tolist() == pytest.approx(
        [personal, -personal], abs=1e-6
    )
    personal = 0.5 + 1 - SIGMA_1
    assert memory["b"].personal.tolist() == pytest.approx(
        [personal, -personal], abs=1e-6
    )


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_each_head_has_its_own_loss(exponent: float) -> None:
    task = linear_task(learning_rate=1.0)
    method = FedRoD(task, FedRoDSettings(prior_exponent=exponent))
    payload = ModelPayload(torch.tensor([0.5, -0.5]))
    part, update = method.client_update(payload, None, white([0, 0, 1]), 1, KEY)
    # 2^γ e^½ / (2^γ e^½ + e^-½); P's is that of γ = 0. Two of three labels are 0.
    balanced = 1 / (1 + math.exp(-1) / 2**exponent)
    generic, personal = 0.5 - (balanced - 2 / 3), -(SIGMA_1 - 2 / 3)
    assert update.weights.tolist() == pytest.approx([generic, -generic], abs=1e-6)
    assert part.personal.tolist() == pytest.approx([personal, -personal], abs=1e-6)


def test_the_body_learns_from_the_generic_head_alone() -> None:
    task = two_weights_task(TrainingSettings(learning_rate=1.0), a=1, b=0.5)
    payload, part = ModelPayload(torch.tensor([1, 0.5])), PersonalPart(torch.ones(1))
    data = white([0, 0, 1])
    after, update = of_name("fedrod", task).client_update(payload, part, data, 2, KEY)
    # Logits of G (½ a, -½ a); 2e / (2e + 1) = p: ∂a = 2b (p - ⅔), ∂b = 2a (p - ⅔).
    slope = 2 * math.e / (2 * math.e + 1) - 2 / 3
    expected = [1 - slope, 0.5 - 2 * slope]
    assert update.weights.tolist() == pytest.approx(expected, abs=1e-6)
    # G + P = 1½: σ(3). P's gradient is 2a (σ(3) - ⅔), with the features from before.
    personal = 1 - 2 * (1 / (1 + math.exp(-3)) - 2 / 3)
    assert after.personal.tolist() == pytest.approx([personal], abs=1e-6)


def test_what_is_sent_does_not_depend_on_the_personal_head() -> None:
    task, data = normed_task(TRAINING), noisy(9, 0, seed=1)
    method, payload = of_name("fedrod", task), ModelPayload(task.initial_weights)
    sent = [
        method.client_update(payload, part, data, 1, KEY)[1].weights
        for part in (None, PersonalPart(torch.full((15,), 3.0)))
    ]
    assert torch.equal(*sent)


def test_served_is_the_sum_of_both_heads_logits() -> None:
    task, data = normed_task(TRAINING), noisy(6, 2, seed=1)
    method, payload = of_name("fedrod", task), ModelPayload(task.initial_weights)
    part = PersonalPart(torch.linspace(-1, 1, 15))
    served = one_model_of(method, payload, part, data)
    images = noisy(8, 0, seed=5).train.images
    weight, bias = part.personal[:12].view(3, 4), part.personal[12:]
    personal = task.embed(payload.weights, images) @ weight.T + bias
    expected = torch.softmax(task.logits(payload.weights, images) + personal, dim=1)
    torch.testing.assert_close(served(images), expected)
    assert served.without_validation() is served
    # Without data, and with a head that is 0, it is the generic model.
    for kept, of in (
        (part, noisy(0, 0, seed=1)),
        (PersonalPart(torch.zeros(15)), data),
    ):
        served = one_model_of(method, payload, kept, of)
        assert torch.equal(served.weights, payload.weights)


def test_an_unseen_client_is_served_a_linear_probe() -> None:
    task, data = normed_task(TRAINING), noisy(6, 2, seed=1)
    payload = ModelPayload(task.initial_weights)
    method = FedRoD(task, FedRoDSettings(unseen_epochs=4))
    model = one_model_of(method, payload, None, data)
    expected = one_model_of(
        topped("linear_probe", task, num_epochs=4), payload, None, data
    )
    assert torch.equal(model.weights, expected.weights)


def test_a_head_on_a_part_of_the_features() -> None:
    task = text_task(learning_rate=0.5)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(4, (4, 1, 1, 5), generator=generator, dtype=torch.uint8)
    train = Examples(text, torch.tensor([0, 1, 1, 3]))
    data = ClientData(train, train.take(torch.arange(0)))
    payload = ModelPayload(task.initial_weights)
    method = of_name("fedrod", task)
    part, _ = method.client_update(payload, None, data, 1, KEY)
    served = one_model_of(method, payload, part, data)
    # A step of P from 0 makes the labels likelier than they are to G.
    logits, generic = (
        evaluate(ModelPredictor(task, weights), train).log_loss_sum
        for weights in (served.weights, payload.weights)
    )
    assert logits < generic


@pytest.mark.parametrize(
    ("layers", "count"),
    [([], 0), ([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)], 2)],
)
def test_heads_whose_logits_do_not_add_up_are_refused(
    layers: list[nn.Module], count: int
) -> None:
    module = NormedModel(FOUR_PIXELS)
    module.classifier = nn.Sequential(*layers)
    task = dataclasses.replace(normed_task(), model=FlatModel(module))
    with pytest.raises(ConfigError, match=f"{count} layers with weights"):
        of_name("fedrod", task)
