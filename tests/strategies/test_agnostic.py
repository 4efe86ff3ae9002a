import math
from dataclasses import replace

import pytest
import torch

from knnper.errors import ConfigError
from knnper.seeding import RandomKey
from knnper.strategies.agnostic import (
    Agnostic,
    AgnosticPayload,
    AgnosticSettings,
    AgnosticState,
    AgnosticUpdate,
)
from tests.strategies.tiny import KEY, linear_task, white

LN2 = math.log(2)
BY_LABEL = AgnosticSettings(domain="label", domain_learning_rate=0.1)
BY_CLIENT = AgnosticSettings(domain_learning_rate=0.1)


def update(
    weights: list[float],
    num_examples: int,
    losses: list[float],
    shares: tuple[float, ...] = (1.0,),
) -> AgnosticUpdate:
    return AgnosticUpdate(
        torch.tensor(weights),
        num_examples,
        0.5,
        torch.tensor(shares),
        torch.tensor(losses),
    )


def known(
    factors: list[float], groups: dict[str, int], examples: list[float], loss: float
) -> AgnosticState:
    """Return the state of clients in these groups, with so many examples each."""
    of_groups, of_clients = torch.tensor(factors), torch.tensor(examples)
    zero = torch.zeros(2)
    return AgnosticState(zero, of_groups[:, None], groups, of_clients[:, None], loss)


def test_a_client_by_hand() -> None:
    method = Agnostic(linear_task(learning_rate=1.0), BY_LABEL)
    payload = AgnosticPayload(torch.zeros(2), torch.tensor([3.0, 0.0]))
    _, update = method.client_update(payload, None, white([0, 0, 1]), 1, KEY)
    assert update.shares.tolist() == pytest.approx([2 / 3, 1 / 3])
    assert update.losses.tolist() == pytest.approx([LN2, LN2])
    # Factors (3, 3, 0) have a mean of 2: the examples weigh (1½, 1½, 0), and the mean
    # gradient is 2 · 1½ · (½ - 1) / 3 = -½.
    assert update.weights.tolist() == pytest.approx([0.5, -0.5])
    assert update.num_examples == 3


def test_two_rounds_of_the_server_by_hand() -> None:
    method = Agnostic(linear_task(), BY_CLIENT)
    start = method.init(["a", "b"], RandomKey(1))
    updates = [("a", update([4.0, 0.0], 3, [1.0])), ("b", update([0.0, 4.0], 1, [3.0]))]
    first = method.aggregate(start, iter(updates))
    # λ begins as p = (¾, ¼), so the models are averaged by examples.
    assert first.weights.tolist() == [3.0, 1.0]
    # λ + 0.1 (1, 3) = (0.85, 0.55), projected (0.65, 0.35); over p: (13/15, 7/5).
    assert first.factors.flatten().tolist() == pytest.approx([13 / 15, 1.4])
    assert first.typical_loss == 2.0
    second = method.aggregate(first, iter(updates))
    # Now a weighs 3 · 13/15 = 2.6 and b weighs 1.4, as λ says of 4.
    assert second.weights.tolist() == pytest.approx([2.6, 1.4])
    # (0.65, 0.35) + (0.1, 0.3), projected: (0.55, 0.45).
    expected = [0.55 / 0.75, 0.45 / 0.25]
    assert second.factors.flatten().tolist() == pytest.approx(expected)


def test_absent_clients_leave_the_step_unbiased() -> None:
    method = Agnostic(linear_task(), BY_CLIENT)
    before = known([1.0, 1.0], {"a": 0, "b": 1}, [3.0, 1.0], 1.0)
    state = method.aggregate(before, iter([("b", update([0.0, 4.0], 1, [2.0]))]))
    # One of two domains replied, so what its loss is above the last mean counts twice:
    # (0.75, 0.25 + 0.1 · 2 · (2 - 1)), projected (0.65, 0.35).
    assert state.factors.flatten().tolist() == pytest.approx([13 / 15, 1.4])
    assert state.weights.tolist() == [0.0, 4.0]
    assert state.typical_loss == 2.0


def test_a_domain_heard_of_later_begins_at_its_share() -> None:
    method = Agnostic(linear_task(), BY_CLIENT)
    start = method.init(["a", "b", "c"], RandomKey(1))
    first = method.aggregate(start, iter([("b", update([1.0, 0.0], 6, [2.0]))]))
    assert first.factors.flatten().tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert first.examples.tolist() == [[0.0], [6.0], [0.0]]
    second = method.aggregate(first, iter([("c", update([0.0, 1.0], 2, [2.0]))]))
    # λ = p = (¾, ¼) over b and c, and the loss of the last round changes nothing.
    assert second.factors.flatten().tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_a_client_that_joins_a_known_domain_leaves_lambda_a_distribution() -> None:
    settings = AgnosticSettings(groups={"x": ("a", "b")}, domain_learning_rate=0.1)
    method = Agnostic(linear_task(), settings)
    before = known([0.6, 2.2], {"a": 0, "b": 0, "c": 1}, [3.0, 0.0, 1.0], 2.0)
    state = method.aggregate(before, iter([("b", update([1.0, 0.0], 4, [2.0]))]))
    # p is now (7, 1) / 8: λ = (0.6 · 7, 2.2) / 8 = (0.525, 0.275) sums to 0.8, and is
    # (0.65625, 0.34375) as a distribution. The loss is the last round's: no step.
    assert state.factors.flatten().tolist() == pytest.approx([0.75, 2.75])


def test_groups_pool_their_clients() -> None:
    settings = AgnosticSettings(
        groups={"census": ("a", "b", "unseen")}, domain_learning_rate=0.1
    )
    method = Agnostic(linear_task(), settings)
    start = method.init(["a", "b", "c"], RandomKey(1))
    assert start.group_of == {"a": 0, "b": 0, "c": 1}
    updates = [
        ("a", update([0.0, 0.0], 3, [1.0])),
        ("b", update([0.0, 0.0], 1, [5.0])),
        ("c", update([0.0, 0.0], 4, [3.0])),
    ]
    state = method.aggregate(start, iter(updates))
    # Losses ¾ · 1 + ¼ · 5 = 2 and 3: (0.5, 0.5) + (0.2, 0.3), projected (0.45, 0.55).
    assert state.factors.flatten().tolist() == pytest.approx([0.9, 1.1])


def test_labels_by_hand() -> None:
    method = Agnostic(linear_task(), BY_LABEL)
    start = method.init(["a", "b"], RandomKey(1))
    updates = [
        ("a", update([1.0, 0.0], 4, [1.0, 3.0], (0.75, 0.25))),
        ("b", update([0.0, 1.0], 4, [2.0, 0.0], (1.0, 0.0))),
    ]
    state = method.aggregate(start, iter(updates))
    assert state.weights.tolist() == [0.5, 0.5]
    # p = (7, 1) / 8; losses (3 · 1 + 4 · 2) / 7 and 3. λ + 0.1 L is too much by
    # 0.1 (11/7 + 3) / 2 each, so λ moves by ± 0.05 (3 - 11/7) = ± 1/14.
    expected = [(7 / 8 - 1 / 14) * 8 / 7, (1 / 8 + 1 / 14) * 8]
    assert state.factors[0].tolist() == pytest.approx(expected)
    # a's weight is 3 · factor 0 + 1 · factor 1, b's is 4 · factor 0.
    weight_a, weight_b = 3 * expected[0] + expected[1], 4 * expected[0]
    after = method.aggregate(state, iter(updates))
    share = weight_a / (weight_a + weight_b)
    assert after.weights.tolist() == pytest.approx([share, 1 - share])


def test_a_domain_without_weight_is_left_out() -> None:
    method = Agnostic(linear_task(), BY_CLIENT)
    before = known([0.0, 4.0], {"a": 0, "b": 1}, [3.0, 1.0], 0.0)
    before = replace(before, weights=torch.tensor([5.0, 5.0]))
    of_a = ("a", update([1.0, 0.0], 3, [2.0]))
    both = method.aggregate(before, iter([of_a, ("b", update([0.0, 1.0], 1, [0.0]))]))
    assert both.weights.tolist() == [0.0, 1.0]
    alone = method.aggregate(before, iter([of_a]))
    assert alone.weights.tolist() == [5.0, 5.0]
    # Its loss brings it back: (0 + 0.1 · 2 · 2, 1), projected (0.2, 0.8).
    assert alone.factors.flatten().tolist() == pytest.approx([0.2 / 0.75, 0.8 / 0.25])


def test_labels_without_weight_are_not_trained_on() -> None:
    method = Agnostic(linear_task(learning_rate=1.0), BY_LABEL)
    payload = AgnosticPayload(torch.tensor([1.0, -1.0]), torch.tensor([0.0, 2.0]))
    _, update = method.client_update(payload, None, white([0, 0]), 1, KEY)
    assert update.weights.tolist() == [1.0, -1.0]
    assert update.losses.tolist() == pytest.approx([math.log(1 + math.exp(-2)), 0.0])


def test_an_update_of_no_kind_is_passed_over() -> None:
    method = Agnostic(linear_task(), BY_CLIENT)
    start = method.init(["a", "b"], RandomKey(1))
    nothing = update([9.0, 9.0], 3, [1.0], (-1.0,))
    state = method.aggregate(start, iter([("a", nothing)]))
    assert torch.equal(state.weights, start.weights)
    assert torch.equal(state.factors, start.factors)


def test_a_group_without_a_seen_client_is_refused() -> None:
    settings = AgnosticSettings(groups={"x": ("a",), "y": ("bb",)})
    method = Agnostic(linear_task(), settings)
    with pytest.raises(ConfigError, match="found none of the seen clients in y, exp"):
        method.init(["a", "b"], RandomKey(1))
