"""BatchNorm that takes a single value per channel; GroupNorm."""

import pytest
import torch
from torch import nn

from knnper.models import NORMS, TolerantBatchNorm2d


@pytest.fixture
def layer() -> TolerantBatchNorm2d:
    layer = TolerantBatchNorm2d(2, eps=0.0)
    layer.running_mean = torch.tensor([1.0, -1.0])
    layer.running_var = torch.tensor([4.0, 0.25])
    return layer.train()


def test_a_single_value_is_normalised_with_the_running_statistics_that_stay(
    layer: TolerantBatchNorm2d,
) -> None:
    value = torch.tensor([3.0, 0.0]).view(1, 2, 1, 1)
    assert layer(value).flatten().tolist() == [1.0, 2.0]  # (3-1)/2, (0+1)/0.5
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.running_mean.tolist() == [1.0, -1.0]
    assert layer.running_var.tolist() == [4.0, 0.25]
    assert torch.equal(layer.eval()(value), layer.train()(value))


@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 2, 1, 2)])
def test_several_values_are_normalised_as_ever(shape: tuple[int, ...]) -> None:
    values = torch.arange(4.0).view(shape) ** 2
    ours, theirs = TolerantBatchNorm2d(2).train(), nn.BatchNorm2d(2).train()
    assert torch.equal(ours(values), theirs(values))
    assert ours.running_mean is not None
    assert theirs.running_mean is not None
    assert torch.equal(ours.running_mean, theirs.running_mean)


def test_group_norm_has_eight_groups() -> None:
    layer = NORMS["group"](16)
    assert isinstance(layer, nn.GroupNorm)
    assert (layer.num_groups, layer.num_channels) == (8, 16)
