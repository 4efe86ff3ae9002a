"""Who pushes the model against all others, by hand."""

import pytest
import torch
from torch import Tensor

from knnper.server.screening import agreements, find_suspects, sketch


def directions(*vectors: Tensor) -> dict[str, Tensor]:
    return dict(zip("abcdefgh", vectors, strict=False))


def cosines(*vectors: Tensor) -> dict[str, float]:
    """Return each client's cosine with the sum of the others' unit vectors."""
    unit = [vector.double() / vector.double().norm() for vector in vectors]
    total = torch.stack(unit).sum(dim=0)
    return {
        client: float(
            client_vector @ (total - client_vector) / (total - client_vector).norm()
        )
        for client, client_vector in zip("abcdefgh", unit, strict=False)
    }


@pytest.mark.parametrize("length", [3, 2048, 50_001, 1_100_000])
def test_agreements_are_cosines_with_the_others(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    common = torch.randn(length, generator=generator)
    vectors = [
        scale * (common + torch.randn(length, generator=generator))
        for scale in (1.0, 1000.0, 1.0, -0.01)
    ]
    origin = {"models/0": torch.zeros(length), "models/1": torch.zeros(2, 2)}
    sketches = {}
    for client, vector in directions(*vectors).items():
        arrived = {
            "models/0": vector,
            "models/1": torch.zeros(2, 2),
            # What was not sent, or in another shape, has no direction.
            "loss": torch.tensor(9e9),
        }
        sketch_of = sketch(arrived, origin)
        assert sketch_of is not None
        sketches[client] = sketch_of
    cosine_of = agreements(sketches)
    assert cosine_of == pytest.approx(cosines(*vectors), abs=0.08)
    if length > 3:
        assert cosine_of["d"] < -0.4 < 0.1 < min(cosine_of[client] for client in "abc")


def test_sketch_of_what_did_not_move_is_none() -> None:
    same = {"weights": torch.ones(5)}
    assert sketch(same, same) is None
    assert sketch(same, {}) is None
    assert sketch({"weights": torch.full((5,), torch.inf)}, same) is None


def test_single_client_has_no_agreement() -> None:
    only_sketch = sketch({"weights": torch.ones(5)}, {"weights": torch.zeros(5)})
    assert only_sketch is not None
    assert agreements({"a": only_sketch}) == {}
    assert agreements({}) == {}


@pytest.mark.parametrize(
    ("rounds", "left_out", "num_clients", "expected"),
    [
        # Means of two rounds: -0.5, 0.4, 0.3, 0.1.
        (
            [
                {"a": -0.8, "b": 0.5, "c": 0.3, "d": 0.1},
                {"a": -0.2, "b": 0.3, "c": 0.3, "d": 0.1},
            ],
            *((), 4, {"a": -0.5}),
        ),
        # The second is at least half as negative as the first, the third is not.
        ([{"a": -0.6, "b": -0.3, "c": -0.2}], (), 5, {"a": -0.6, "b": -0.3}),
        # All oppose one another, as with too large a learning rate: nobody stands out.
        ([{"a": -0.7, "b": -0.5, "c": -0.6}], (), 3, {}),
        # Two of four are no minority.
        ([{"a": -0.7, "b": -0.5, "c": 0.6}], (), 4, {}),
        # With those that are left out already.
        ([{"a": -0.9, "b": -0.5, "c": 0.6}], ("a",), 5, {"b": -0.5}),
        ([{"b": -0.5, "c": 0.6}], ("a",), 4, {}),
        ([{"a": 0.1, "b": 0.2}], (), 9, {}),
        *(([], (), 9, {}), ([{}], (), 9, {})),
    ],
)
def test_suspects_by_hand(
    rounds: list[dict[str, float]],
    left_out: tuple[str, ...],
    num_clients: int,
    expected: dict[str, float],
) -> None:
    assert find_suspects(rounds, left_out, num_clients) == pytest.approx(expected)
