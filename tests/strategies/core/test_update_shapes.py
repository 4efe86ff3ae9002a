from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from knnper.strategies.core.method import unlike_sent, wrong_shape
from knnper.strategies.core.records import Record


@dataclass(frozen=True)
class Several(Record):
    """Tensors of any number, and one that may be missing."""

    models: tuple[Tensor, ...]
    loss: Tensor | None = None


def several(*lengths: int, loss: Tensor | None = None) -> Several:
    return Several(tuple(torch.zeros(length) for length in lengths), loss)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((), None),
        (None, None),
        ((1,), "loss: expected shape (), found (1,)"),
        ((0,), "loss: expected shape (), found (0,)"),
    ],
)
def test_a_field_has_its_shape_or_is_missing(
    shape: tuple[int, ...] | None, problem: str | None
) -> None:
    loss = None if shape is None else torch.zeros(shape)
    assert wrong_shape(several(loss=loss), loss=()) == problem


@pytest.mark.parametrize("lengths", [(3,), (3, 3, 3), (3, 2), ()])
def test_as_many_come_back_as_were_sent_and_as_large(lengths: tuple[int, ...]) -> None:
    assert unlike_sent(several(3, 3), several(3, 3), "models") is None
    found = [(length,) for length in lengths]
    assert unlike_sent(several(3, 3), several(*lengths), "models") == (
        f"models: expected tensors of shapes [(3,), (3,)], found {found}"
    )
