"""The faster convolutions compute what torch's do, and their gradients."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from knnper.convolutions import (
    DepthwiseConv2d,
    PointwiseConv2d,
    use_faster_convolutions,
)
from knnper.process import import_torchvision
from knnper.seeding import RandomKey


def images(num: int, channels: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(height + 10 * width)
    values = torch.randn((num, height, width, channels), generator=generator)
    return values.double().permute(0, 3, 1, 2)


def results(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return what comes out, and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    out = layer(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, *torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])


def faster(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    other = copy.deepcopy(layer)
    use_faster_convolutions(other)
    assert type(other) is kind
    return other


def compare(layer: nn.Module, kind: type[nn.Module], x: Tensor) -> None:
    for found, expected in zip(
        results(faster(layer, kind), x), results(layer, x), strict=True
    ):
        torch.testing.assert_close(found, expected)


@given(
    height=st.integers(1, 5),
    width=st.integers(1, 5),
    kernel_size=st.sampled_from([(1, 3), (3, 3), (5, 3), (5, 5)]),
    stride=st.integers(1, 3),
    bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_depthwise_convolution_and_its_gradients_are_those_of_torch(
    height: int, width: int, kernel_size: tuple[int, int], stride: int, bias: bool
) -> None:
    padding = (kernel_size[0] // 2, kernel_size[1] // 2)
    layer = nn.Conv2d(3, 3, kernel_size, stride, padding, groups=3, bias=bias)
    compare(layer.double(), DepthwiseConv2d, images(2, 3, height, width))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_a_pointwise_convolution_and_its_gradients_are_those_of_torch(
    size: int, bias: bool
) -> None:
    layer, x = nn.Conv2d(3, 5, 1, bias=bias).double(), images(4, 3, size, size)
    assert "Convolution" in layer(x).grad_fn.name()
    assert "Permute" in faster(layer, PointwiseConv2d)(x).grad_fn.name()
    compare(layer, PointwiseConv2d, x)


def test_the_gradient_of_a_depthwise_weight_is_that_of_a_sum_by_hand() -> None:
    layer = nn.Conv2d(2, 2, 3, padding=1, groups=2, bias=False)
    layer.weight.data.zero_()
    use_faster_convolutions(layer)
    x = torch.tensor([[[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]]])
    out = layer(x.contiguous(memory_format=torch.channels_last))
    assert "Depthwise" in out.grad_fn.name()  # and not the gradient of torch
    out.sum().backward()
    assert layer.weight.grad is not None
    # Each place meets the pixels that lie below it, wherever the kernel stands.
    expected = [[1.0, 3, 2], [4, 10, 6], [3, 7, 4]]
    assert layer.weight.grad[0, 0].tolist() == expected
    assert layer.weight.grad[1, 0, 1, 1] == 26


def test_there_are_gradients_of_gradients() -> None:
    layer = faster(nn.Conv2d(2, 2, 3, padding=1, groups=2).double(), DepthwiseConv2d)
    x = images(2, 2, 2, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x).pow(2), x)


def test_one_call_for_many_sets_of_weights() -> None:
    layer = faster(nn.Conv2d(2, 2, 3, padding=1, groups=2), DepthwiseConv2d)
    x = images(3, 2, 2, 2).float()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        found = torch.func.functional_call(layer, parameters, (x,))
        assert isinstance(found, Tensor)
        return found.pow(2).sum()

    both = {name: torch.stack([p, 2 * p]) for name, p in layer.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss))(both)
    for place in range(2):
        one = {name: p[place] for name, p in both.items()}
        expected = torch.func.grad(loss)(one)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name][place], gradient)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding="same", groups=4),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, padding=1),
        type("OfAUser", (nn.Conv2d,), {})(4, 4, 1),
    ],
)
def test_other_convolutions_stay(layer: nn.Module) -> None:
    before = type(layer)
    use_faster_convolutions(layer)
    assert type(layer) is before


def test_mobilenet_is_the_same_network() -> None:
    with RandomKey(0).torch():
        plain = import_torchvision().models.mobilenet_v2(num_classes=3)
    other = copy.deepcopy(plain)
    use_faster_convolutions(other)
    kinds = [type(layer) for layer in other.modules() if isinstance(layer, nn.Conv2d)]
    assert kinds.count(DepthwiseConv2d) == 17
    assert kinds.count(PointwiseConv2d) == 34
    assert [*other.state_dict()] == [*plain.state_dict()]
    x = images(4, 3, 32, 32)
    found, expected = (results(one.double().eval(), x) for one in (other, plain))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)
