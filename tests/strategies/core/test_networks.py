"""Attention over clients, and hypernetworks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.seeding import RandomKey
from knnper.strategies.fedattn import (
    Attention,
    KnownClients,
    Memory,
    attend,
    gradients,
    nearest,
    new_attention,
    nobody,
    step,
)
from knnper.strategies.pfedhn import (
    Hypernetwork,
    Layer,
    generate,
    hypernetwork_gradients,
    new_hypernetwork,
)

ATTENTION = Attention(
    torch.tensor([[2.0]]), torch.tensor([[1.0]]), torch.tensor([1.0, 3.0])
)
HALF_LOG_3 = math.log(3) / 2
MEMORY = Memory(
    torch.tensor([[0.0], [HALF_LOG_3]]), torch.tensor([[4.0, 0.0], [0.0, 4.0]])
)
ASKS = torch.tensor([1.0])


def test_attention_by_hand() -> None:
    # The query is 2, so the scores are 0 and ln 3 and the shares ¼ and ¾: the mean of
    # the values is (1, 3), and W_V makes (1, 9) of it.
    made = attend(ATTENTION, ASKS, MEMORY)
    assert made.tolist() == pytest.approx([1.0, 9.0], rel=1e-6)


def test_scores_are_divided_by_the_root_of_their_size() -> None:
    four = Attention(
        torch.full((4, 1), 1.0), torch.full((4, 1), 1.0), torch.tensor([1.0, 1.0])
    )
    # Scores 4 z_j / √4, of which the second is ln 3 again.
    made = attend(four, ASKS, MEMORY)
    assert made.tolist() == pytest.approx([1.0, 3.0], rel=1e-6)


def test_gradients_by_hand() -> None:
    trained = torch.tensor([0.0, 9.0])
    of_query, of_key, of_value = gradients(ATTENTION, ASKS, MEMORY, trained)
    # ΔM̃ = (1, 0). A score has share_j (c_j - 1) with c = (4, 0): ¾ and -¾.
    assert of_value.tolist() == pytest.approx([1.0, 0.0], abs=1e-5)
    assert float(of_query) == pytest.approx(-0.75 * HALF_LOG_3, rel=1e-5)
    assert float(of_key) == pytest.approx(-0.75 * HALF_LOG_3 * 2, rel=1e-5)


def test_a_step_goes_against_the_gradients() -> None:
    directions = [torch.tensor([[1.0]]), torch.tensor([[-2.0]]), torch.tensor([4.0, 0])]
    stepped = step(ATTENTION, directions, 0.5)
    assert stepped.query.tolist() == [[1.5]]
    assert stepped.key.tolist() == [[2.0]]
    assert stepped.value.tolist() == [-1.0, 3.0]


def test_steps_bring_what_is_made_nearer_to_what_was_trained() -> None:
    attention, trained = ATTENTION, torch.tensor([2.0, 2.0])
    for _ in range(50):
        directions = gradients(attention, ASKS, MEMORY, trained)
        attention = step(attention, directions, 0.01)
    before, after = (
        float((attend(one, ASKS, MEMORY) - trained).norm())
        for one in (ATTENTION, attention)
    )
    assert after < 0.5 * before


def test_a_new_attention_is_the_mean_of_the_values() -> None:
    attention = new_attention(8, 3, 2, RandomKey(1))
    memory = Memory(torch.randn(4, 3), torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    assert attend(attention, torch.randn(3), memory).tolist() == [4.0, 5.0]
    of_query, of_key, _ = gradients(
        attention, torch.ones(3), memory, torch.tensor([0.0, 0.0])
    )
    assert float(of_query.norm()) > 0
    assert float(of_key.norm()) == 0


def test_a_new_attention_is_fixed_by_its_key() -> None:
    first, again, other = (
        new_attention(8, 3, 2, RandomKey(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first.key, again.key)
    assert not torch.equal(first.key, other.key)


@settings(max_examples=30, deadline=None)
@given(
    places=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    asks=st.integers(0, 4),
    count=st.integers(1, 35),
)
def test_the_nearest_are_those_of_a_full_sort(
    places: list[int], asks: int, count: int
) -> None:
    rows = list(range(len(places)))
    memory = Memory(
        torch.tensor(places, dtype=torch.float32)[:, None],
        torch.tensor(rows, dtype=torch.float32)[:, None],
    )
    found = nearest(memory, torch.tensor([float(asks)]), count)
    expected = sorted(rows, key=lambda row: (abs(places[row] - asks), row))[:count]
    assert found.values[:, 0].tolist() == expected


def test_known_clients_are_sorted_and_renewed() -> None:
    def row(number: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([number]), torch.tensor([number, -number])

    first = nobody(1, 2).updated({"b": row(2.0), "a": row(1.0)})
    assert first.names == ("a", "b")
    second = first.updated({"b": row(5.0), "aa": row(3.0)})
    assert second.names == ("a", "aa", "b")
    assert second.memory.representations.tolist() == [[1.0], [3.0], [5.0]]
    assert second.of("b")[1].tolist() == [5.0, -5.0]
    assert first.of("b")[1].tolist() == [2.0, -2.0]
    assert isinstance(first.updated({}), KnownClients)
    assert len(nobody(1, 2).updated({}).memory) == 0


NETWORK = Hypernetwork(
    (
        Layer(torch.tensor([[1.0], [-2.0]]), torch.tensor([0.0, 1.0])),
        Layer(torch.tensor([[3.0, 5.0]]), torch.tensor([7.0])),
    )
)


@pytest.mark.parametrize(
    ("embedding", "generated"),
    [
        (2.0, 13.0),  # units relu(2) = 2, relu(-3) = 0: 3 · 2 + 7
        (-1.0, 22.0),  # units relu(-1) = 0, relu(3) = 3: 5 · 3 + 7
        (0.25, 10.25),  # units ¼ and ½: ¾ + 5/2 + 7
    ],
)
def test_a_hypernetwork_generates_by_hand(embedding: float, generated: float) -> None:
    assert generate(NETWORK, torch.tensor([embedding])).tolist() == [generated]


def test_gradients_of_a_hypernetwork_by_hand() -> None:
    # v = -1: only the second unit, 3, is open. θ = 22, trained to 20: Δθ = 2.
    found = hypernetwork_gradients(NETWORK, torch.tensor([-1.0]), torch.tensor([20.0]))
    first_weight, first_bias, last_weight, last_bias = found.layers
    assert last_weight.tolist() == [[0.0, 6.0]]
    assert last_bias.tolist() == [2.0]
    # The open unit gets 2 · 5 = 10; its weight 10 · v; the embedding 10 · (-2).
    assert first_weight.tolist() == [[0.0], [-10.0]]
    assert first_bias.tolist() == [0.0, 10.0]
    assert found.embedding.tolist() == [-20.0]


def test_a_new_hypernetwork_is_fixed_by_its_key() -> None:
    parameters = torch.tensor([1.0, 2.0, 3.0])
    first, again = (new_hypernetwork([4, 5], parameters, RandomKey(1)) for _ in "ab")
    other = new_hypernetwork([4, 5], parameters, RandomKey(2))
    v = torch.ones(4)
    assert torch.equal(generate(first, v), generate(again, v))
    assert not torch.equal(generate(first, v), generate(other, v))
    assert torch.equal(first.layers[-1].bias, parameters)
