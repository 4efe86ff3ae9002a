import math

import pytest
import torch

from knnper.strategies import fedem as module
from knnper.strategies.core.method import UNSEEN_CLIENT, Method
from knnper.strategies.core.predictors import MixturePredictor
from knnper.strategies.core.task import Task
from knnper.strategies.fedem import (
    Components,
    ComponentsUpdate,
    FedEM,
    FedEMSettings,
    MixtureState,
    responsibilities,
)
from tests.strategies.tiny import KEY, linear_task, normed_task, white

LN3 = math.log(3)
EVEN = torch.tensor([0.0, 0.0])  # p(0) = ½
SKEWED = torch.tensor([LN3, 0.0])  # p(0) = ¾


def fedem_of(task: Task, num_components: int = 2) -> Method:
    return FedEM(task, FedEMSettings(num_components))


def test_client_step_by_hand() -> None:
    method = fedem_of(linear_task(learning_rate=1.0))
    payload = Components((EVEN, SKEWED))
    memory, update = method.client_update(payload, None, white([0, 0, 0]), 1, KEY)
    # E-step from π = (½, ½): q ∝ (½ · ½, ½ · ¾), so q = (0.4, 0.6) for each example.
    assert memory.mixture_weights.tolist() == pytest.approx([0.4, 0.6])
    # Weighted gradients: 0.4 (½ - 1) = -0.2 and 0.6 (¾ - 1) = -0.15.
    even, skewed = update.components
    assert even.tolist() == pytest.approx([0.2, -0.2])
    assert skewed.tolist() == pytest.approx([LN3 + 0.15, -0.15])
    loss = 0.4 * math.log(2) + 0.6 * math.log(4 / 3)
    assert update.train_loss == pytest.approx(loss)
    assert update.num_examples == 3


def test_the_next_step_starts_from_the_clients_mixture() -> None:
    method = fedem_of(linear_task())
    memory = MixtureState(torch.tensor([0.4, 0.6]))
    memory, _ = method.client_update(
        Components((EVEN, SKEWED)), memory, white([0, 1]), 2, KEY
    )
    # Label 0: q_0 = 0.4 · ½ / (0.4 · ½ + 0.6 · ¾) = 4/13; label 1: 0.2 / 0.35 = 4/7.
    expected = (4 / 13 + 4 / 7) / 2
    mixture_weights = memory.mixture_weights.tolist()
    assert mixture_weights == pytest.approx([expected, 1 - expected])


def test_components_are_averaged_by_examples() -> None:
    method = fedem_of(linear_task())
    first, second = torch.ones(2), torch.full((2,), 2.0)
    updates = [
        ("a", ComponentsUpdate((first, second), num_examples=3, train_loss=0.1)),
        ("b", ComponentsUpdate((-first, 3 * second), num_examples=1, train_loss=0.1)),
    ]
    # ¾ · 1 - ¼ · 1 = ½ and ¾ · 2 + ¼ · 6 = 3.
    state = method.aggregate(Components((first, second)), iter(updates))
    assert [component.tolist() for component in state.components] == [
        [0.5, 0.5],
        [3.0, 3.0],
    ]


def test_served_mixture_by_hand() -> None:
    method = fedem_of(linear_task())
    data = white([0], [1, 1])
    payload = Components((EVEN, SKEWED))
    predictor = method.personalize(payload, None, data, KEY)
    # Label 0 gives q_0 = 0.4 as above, label 1 gives ½ / (½ + ¼) = 2/3; over both
    # splits π_0 = (0.4 + 2/3 + 2/3) / 3. Then p(0) = π_0 · ½ + (1 - π_0) · ¾.
    share = (0.4 + 4 / 3) / 3
    chosen = predictor.describe()
    assert list(chosen) == ["mixture_weight_0", "mixture_weight_1"]
    assert list(chosen.values()) == pytest.approx([share, 1 - share])
    served = predictor(data.train.images)
    expected = share / 2 + (1 - share) * 3 / 4
    assert served[0].tolist() == pytest.approx([expected, 1 - expected])


@pytest.mark.parametrize(
    ("num_steps", "memory", "expected"),
    [
        (1, None, 0.4),
        (2, None, 0.2 / 0.65),
        (200, None, 0.0),  # all of it is the component that fits best
        (2, MixtureState(torch.tensor([0.4, 0.6])), 0.2 / 0.65),
        (200, MixtureState(torch.tensor([0.5, 0.5])), 0.4),  # a member makes one step
    ],
)
@pytest.mark.parametrize("held_out", [[1, 1], [0], []])
def test_what_has_not_seen_the_validation_split_is_of_the_training_rows_alone(
    num_steps: int, memory: MixtureState | None, expected: float, held_out: list[int]
) -> None:
    task = linear_task()
    method = FedEM(task, FedEMSettings(num_components=2, unseen_steps=num_steps))
    data = white([0], held_out)
    served = method.personalize(Components((EVEN, SKEWED)), memory, data, KEY)
    assert isinstance(served, MixturePredictor)
    # From (½, ½) label 0 leads to (0.4, 0.6), and from there to (0.2, 0.45) / 0.65.
    before = served.without_validation().describe()
    assert before["mixture_weight_0"] == pytest.approx(expected, abs=1e-6)
    moved = served.describe()["mixture_weight_0"] != pytest.approx(expected, abs=1e-6)
    assert moved == (1 in held_out)


def test_without_data_the_mixture_is_uniform() -> None:
    method = fedem_of(linear_task())
    memory = MixtureState(torch.tensor([0.9, 0.1]))
    predictor = method.personalize(Components((EVEN, SKEWED)), memory, white([]), KEY)
    assert list(predictor.describe().values()) == [0.5, 0.5]


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_responsibilities_sum_to_one_however_bad_the_fit(scale: float) -> None:
    task = linear_task()
    components = [scale * torch.tensor([-1.0, 1.0]), scale * torch.tensor([-2.0, 2.0])]
    losses = module.example_losses(task, components, white([0, 1]).train)
    shares = responsibilities(losses, torch.tensor([0.5, 0.5]))
    assert shares.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert float(shares[0, 0]) > float(shares[0, 1])


def test_components_start_apart_and_the_first_from_the_initial_weights() -> None:
    task = normed_task()
    method = fedem_of(task, 3)
    first, second, third = method.init(["a"], KEY).components
    assert torch.equal(first, task.initial_weights)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    again = method.broadcast(method.init(["a"], KEY), UNSEEN_CLIENT, KEY)
    assert torch.equal(second, again.components[1])
