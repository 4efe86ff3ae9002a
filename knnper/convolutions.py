"""Convolutions of small images, several times faster on CPUs than torch's own.

An image of 32x32 pixels is one of 2x2 or 1x1 in most layers of MobileNetV2. oneDNN,
which computes torch's convolutions, spends more time there on rearranging weights, and
on the gradients of depthwise ones, than on products.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def use_faster_convolutions(module: nn.Module) -> None:
    """Let the convolutions of ``module`` compute the same with fewer steps, in place.

    Parameters and their names stay. Results differ by rounding.
    """
    for layer in module.modules():
        # Not a new layer in its place: hooks and references of others stay valid.
        if type(layer) is nn.Conv2d and _is_pointwise(layer):
            layer.__class__ = PointwiseConv2d
        elif type(layer) is nn.Conv2d and _is_depthwise(layer):
            layer.__class__ = DepthwiseConv2d


def _is_pointwise(layer: nn.Conv2d) -> bool:
    has_one_place = layer.kernel_size == layer.stride == (1, 1)
    return has_one_place and layer.groups == 1 and layer.padding == (0, 0)


def _is_depthwise(layer: nn.Conv2d) -> bool:
    return (
        layer.groups == layer.in_channels == layer.out_channels
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _is_plain(x: Tensor) -> bool:
    """Return whether ``x`` is where and how the faster ways are faster."""
    return (
        x.device.type == "cpu"
        and x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
    )


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution as one product of matrices, with no weights rearranged."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the base class's name)
        """Return shape (n, out_channels, height, width)."""
        if not _is_plain(input):
            return super().forward(input)
        pixels, weight = input.permute(0, 2, 3, 1), self.weight.flatten(1)
        return functional.linear(pixels, weight, self.bias).permute(0, 3, 1, 2)


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution with another gradient for inputs smaller than the kernel.

    Its weight's, which takes oneDNN forty times as long as the input's there.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the base class's name)
        """Return shape (n, channels, height, width)."""
        is_small = any(map(int.__lt__, input.shape[-2:], self.kernel_size))
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        if not (is_small and trains and _is_plain(input)):
            return super().forward(input)
        if torch.is_autocast_enabled("cpu"):  # which does not reach into a Function
            return super().forward(input)
        found: Tensor = _Depthwise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.stride, self.padding
        )
        return found if self.bias is None else found + self.bias[:, None, None]


class _Depthwise(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        return functional.conv2d(x, weight, None, stride, padding, 1, len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        x, weight, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x, _, _ = torch.ops.aten.convolution_backward(
                *(grad, x, weight, None, ctx.stride, ctx.padding, (1, 1), False),
                *((0, 0), len(weight), (True, False, False)),
            )
        return of_x, _weight_gradient(grad, x, weight, ctx), None, None


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> Tensor:
    """Return for each place of the kernel the sum over the pixels that it meets."""
    grad, x = grad.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)
    found = []
    for place in itertools.product(*map(range, weight.shape[-2:])):
        (above, below), (left, right) = map(
            _meeting, place, ctx.padding, ctx.stride, x.shape[1:3], grad.shape[1:3]
        )
        found.append((grad[:, above, left] * x[:, below, right]).sum((0, 1, 2)))
    return torch.stack(found, 1).view_as(weight)


def _meeting(
    place: int, padding: int, stride: int, size: int, result_size: int
) -> tuple[slice, slice]:
    """Return the results that a place of the kernel adds to, and what it meets."""
    offset = place - padding
    first = max(0, -(offset // stride))
    stop = max(first, min(result_size, (size - 1 - offset) // stride + 1))
    start = first * stride + offset
    return slice(first, stop), slice(start, start + (stop - first) * stride, stride)
