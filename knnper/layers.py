"""Layers that are faster on CPUs than torch's own, with equal results up to rounding.

An image of 32x32 pixels has 2x2 or 1x1 pixels in most layers of MobileNetV2. For these,
oneDNN, which computes torch's convolutions, spends more time on rearranging weights
and on the gradients of depthwise convolutions than on products.

torch uses MKL for matrix products, which takes twice as long as oneDNN on AMD CPUs: a
tenth to a fifth of a network's training time.

Without training, BatchNorm is a factor and a bias of the convolution before it.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from knnper.process import cpu_is

# Number of multiplications from which on oneDNN saves more than its call costs.
_LEAST_PRODUCTS = 1 << 20
LayerFunction = Callable[[Tensor], Tensor]
_ACTIVATIONS: Mapping[type[nn.Module], LayerFunction] = {
    nn.ReLU: torch.relu_,
    nn.ReLU6: functools.partial(torch.clamp_, min=0.0, max=6.0),
}


def use_faster_layers(module: nn.Module) -> None:
    """Replace the computation of layers by a faster one, in place.

    Parameters and their names stay. Results differ by rounding.
    """
    for layer in module.modules():
        # The class is changed, so that hooks and references to the layer stay valid.
        if type(layer) is nn.Conv2d and _is_pointwise(layer):
            layer.__class__ = PointwiseConv2d
        elif type(layer) is nn.Conv2d and _is_depthwise(layer):
            layer.__class__ = DepthwiseConv2d
        elif type(layer) is nn.Linear:
            layer.__class__ = FasterLinear
        elif _is_list(layer) and any(
            isinstance(sublayer, nn.BatchNorm2d) for sublayer in layer
        ):
            layer.__class__ = FoldingSequential


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
    """Return whether ``x`` is on the CPU and channels-last, as the faster ways need."""
    return (
        x.device.type == "cpu"
        and x.dim() == 4
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.compiler.is_compiling()
    )


def _is_float32(x: Tensor) -> bool:
    # Autocast has no effect on the functions called below.
    return x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias``: shapes (..., a), (b, a), (b,), and (..., b)."""
    num_rows = x.numel() // max(1, x.shape[-1])
    if (
        x.numel() * len(weight) < _LEAST_PRODUCTS
        or num_rows == 1  # bound by reading the weights; nothing is faster
        or not x.device.type == weight.device.type == "cpu"
        or not (_is_float32(x) and _is_float32(weight))
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()  # as vmap: one call for many
        or not _is_faster_in_onednn()
    ):
        return functional.linear(x, weight, bias)
    result = _product(x.reshape(num_rows, -1), weight, bias)
    return result.view(*x.shape[:-1], len(weight))


@functools.cache
def _is_faster_in_onednn() -> bool:
    # The operator that torch.compile calls; without it torch's own product is used.
    has_call = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return has_call and has_mkl and cpu_is("AuthenticAMD")


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b.T + bias``, of shape (m, n)."""
    if torch.is_grad_enabled():
        product: Any = _Product.apply
        result: Tensor = product(a, b, bias)
        return result
    return _Product.forward(a, b, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        a, b, _bias = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        of_a = _product(grad, b.t()) if ctx.needs_input_grad[0] else None
        of_b = None
        if ctx.needs_input_grad[1]:
            # oneDNN rearranges its first factor, so that is the smaller one.
            if grad.shape[1] <= a.shape[1]:
                of_b = _product(grad.t(), a.t())
            else:
                of_b = _product(a.t(), grad.t()).t()
        return of_a, of_b, grad.sum(0) if ctx.needs_input_grad[2] else None


class FasterLinear(nn.Linear):
    """A linear layer that computes its products with the faster library."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the base class's name)
        """Return shape (..., out_features)."""
        return _linear(input, self.weight, self.bias)


class PointwiseConv2d(nn.Conv2d):
    """A 1x1 convolution as one matrix product, without rearranging weights."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Return shape (n, out_channels, height, width)."""
        if not _is_plain(x):
            return super()._conv_forward(x, weight, bias)
        pixels = x.permute(0, 2, 3, 1)
        return _linear(pixels, weight.flatten(1), bias).permute(0, 3, 1, 2)


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution with a faster gradient of its weight.

    Used for inputs smaller than the kernel, where oneDNN needs forty times as long for
    the gradient of the weight as for that of the input.
    """

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Return shape (n, channels, height, width)."""
        is_small = any(map(int.__lt__, x.shape[-2:], self.kernel_size))
        trains = torch.is_grad_enabled() and weight.requires_grad
        # Autocast has no effect inside a Function.
        is_cast = torch.is_autocast_enabled("cpu")
        if is_cast or not (is_small and trains and _is_plain(x)):
            return super()._conv_forward(x, weight, bias)
        result = _Depthwise.apply(  # type: ignore[no-untyped-call]
            x, weight, self.stride, self.padding
        )
        return result if bias is None else result + bias[:, None, None]


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
                grad,
                x,
                weight,
                None,
                ctx.stride,
                ctx.padding,
                (1, 1),
                False,
                (0, 0),
                len(weight),
                (True, False, False),
            )
        return of_x, _weight_gradient(grad, x, weight, ctx), None, None


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> Tensor:
    """Return the gradient of the weight: a sum over pixels for each kernel position."""
    grad, x = grad.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)
    gradients = []
    for place in itertools.product(*map(range, weight.shape[-2:])):
        (above, below), (left, right) = map(
            _meeting, place, ctx.padding, ctx.stride, x.shape[1:3], grad.shape[1:3]
        )
        gradients.append((grad[:, above, left] * x[:, below, right]).sum((0, 1, 2)))
    return torch.stack(gradients, 1).view_as(weight)


def _meeting(
    place: int, padding: int, stride: int, size: int, result_size: int
) -> tuple[slice, slice]:
    """Return the outputs that use a kernel position, and the inputs at it."""
    offset = place - padding
    first = max(0, -(offset // stride))
    stop = max(first, min(result_size, (size - 1 - offset) // stride + 1))
    start = first * stride + offset
    return slice(first, stop), slice(start, start + (stop - first) * stride, stride)


class TolerantBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that accepts a batch with a single value per channel.

    One image at 1x1 resolution has no variance, and `torch.nn.BatchNorm2d` refuses to
    train on it. Such a batch is normalised with the running statistics and does not
    update them.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the base class's name)
        """Return ``input``, shape (n, channels, height, width), normalised."""
        if not self.training or input.numel() != input.shape[1]:
            return super().forward(input)
        mean, var = self.running_mean, self.running_var
        scale, shift = self.weight, self.bias
        return functional.batch_norm(input, mean, var, scale, shift, eps=self.eps)


def _is_list(layer: nn.Module) -> TypeGuard[nn.Sequential]:
    """Return whether a layer only calls its sublayers in turn."""
    # torchvision has a subclass for a convolution with normalisation and activation.
    is_torchvision = type(layer).__module__ == "torchvision.ops.misc"
    is_one = isinstance(layer, nn.Sequential)
    return type(layer) is nn.Sequential or (is_one and is_torchvision)


class FoldingSequential(nn.Sequential):
    """A sequence of layers that can fold BatchNorm into the convolution before it.

    It does so in evaluation mode, in ``torch.inference_mode``, and between
    ``fold(True)`` and ``fold(False)``. Weights must not change between these two calls.
    """

    _folds = False
    _folded: tuple[Sequence[LayerFunction], Sequence[Mapping[int, Any]]] | None = None

    def fold(self, folds: bool) -> None:
        """Allow folding, until the weights change, or end it."""
        self._folds, self._folded = folds, None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which does not fold: its weights may change."""
        return {**vars(self), "_folds": False, "_folded": None}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the base class's name)
        """Return the output of the last layer."""
        steps: Iterable[LayerFunction] = self
        if self._folds and not self.training and torch.is_inference_mode_enabled():
            folded = self._folded or (list(_steps(self)), list(_hooks(self)))
            # Hooks must be called with the input and output of each layer.
            steps = self if any(folded[1]) else folded[0]
            self._folded = folded
        x = input
        for step in steps:
            x = step(x)
        return x


def _hooks(module: nn.Module) -> Iterator[Mapping[int, Any]]:
    """Yield the dictionaries of hooks of all layers below ``module``."""
    for layer in list(module.modules())[1:]:
        yield layer._forward_hooks
        yield layer._forward_pre_hooks


def _steps(layers: nn.Sequential) -> Iterator[LayerFunction]:
    """Yield the computations of the layers in evaluation mode, in few calls.

    Calls of modules are a fifth of the time that MobileNetV2 takes for one image.
    """
    pending = deque(layers)
    while pending:
        layer = pending.popleft()
        if isinstance(layer, FoldingSequential):
            yield from _steps(layer)
        elif pending and (together := _together(layer, pending[0])):
            pending.popleft()
            yield together
            if pending and (activation := _ACTIVATIONS.get(type(pending[0]))):
                pending.popleft()
                yield activation
        else:
            yield layer


def _together(layer: nn.Module, norm: nn.Module) -> LayerFunction | None:
    """Fold a BatchNorm into the convolution before it; None for other layers."""
    if (
        not isinstance(layer, nn.Conv2d)
        or type(layer) not in (nn.Conv2d, PointwiseConv2d, DepthwiseConv2d)
        or not isinstance(norm, nn.BatchNorm2d)
        or type(norm) not in (nn.BatchNorm2d, TolerantBatchNorm2d)
        or norm.training
        or norm.running_mean is None
    ):
        return None
    assert norm.running_var is not None, "set together with the mean"
    weight, bias = fuse_conv_bn_weights(
        layer.weight,
        layer.bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
    )
    return functools.partial(layer._conv_forward, weight=weight, bias=bias)
