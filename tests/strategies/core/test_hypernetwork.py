import pytest
import torch

from knnper.seeding import RandomKey
from knnper.strategies.core.networks import (
    Hypernetwork,
    Layer,
    generate,
    hypernetwork_gradients,
    new_hypernetwork,
)

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
def test_generates_by_hand(embedding: float, generated: float) -> None:
    assert generate(NETWORK, torch.tensor([embedding])).tolist() == [generated]


def test_gradients_by_hand() -> None:
    # v = -1: only the second unit, 3, is open. θ = 22, trained to 20: Δθ = 2.
    found = hypernetwork_gradients(NETWORK, torch.tensor([-1.0]), torch.tensor([20.0]))
    first_weight, first_bias, last_weight, last_bias = found.layers
    assert last_weight.tolist() == [[0.0, 6.0]]
    assert last_bias.tolist() == [2.0]
    # The open unit gets 2 · 5 = 10; its weight 10 · v; the embedding 10 · (-2).
    assert first_weight.tolist() == [[0.0], [-10.0]]
    assert first_bias.tolist() == [0.0, 10.0]
    assert found.embedding.tolist() == [-20.0]


def test_a_new_one_is_fixed_by_its_key() -> None:
    parameters = torch.tensor([1.0, 2.0, 3.0])
    first, again = (new_hypernetwork([4, 5], parameters, RandomKey(1)) for _ in "ab")
    other = new_hypernetwork([4, 5], parameters, RandomKey(2))
    v = torch.ones(4)
    assert torch.equal(generate(first, v), generate(again, v))
    assert not torch.equal(generate(first, v), generate(other, v))
    assert torch.equal(first.layers[-1].bias, parameters)
