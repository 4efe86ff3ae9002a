import torch

from knnper.strategies.core.averaging import denominator


def test_nothing_by_nothing_is_nothing() -> None:
    found = torch.tensor([0.0, 3.0]) / denominator(torch.tensor([0.0, 2.0]))
    assert found.tolist() == [0.0, 1.5]
