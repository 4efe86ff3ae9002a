"""A partition of a model's weights into blocks: layers, stages, or the whole model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from knnper.flat_model import FlatModel


@dataclass(frozen=True, eq=False)
class Blocks:
    """A partition of the weights into blocks with one coefficient each."""

    # The block of each weight, int64 of shape (num_weights,), on the model's device;
    # blocks are numbered from 0 without gaps.
    of_weight: Tensor

    @cached_property
    def num_blocks(self) -> int:
        """B, the number of blocks."""
        return int(self.of_weight.max()) + 1

    @cached_property
    def _runs(self) -> tuple[list[int], list[int]]:
        blocks, sizes = torch.unique_consecutive(self.of_weight, return_counts=True)
        return blocks.tolist(), sizes.tolist()

    def spread(self, values: Tensor) -> Tensor:
        """Expand one value for each block, (..., B), to all weights, (..., d)."""
        return values[..., self.of_weight]

    def sums(self, products: Tensor) -> Tensor:
        """Sum products (..., num_weights) over each block, to (..., B)."""
        blocks, sizes = self._runs
        sums = products.new_zeros((*products.shape[:-1], self.num_blocks))
        parts = torch.split(products, sizes, dim=-1)
        for block, part in zip(blocks, parts, strict=True):
            sums[..., block] += part.sum(dim=-1)
        return sums

    def combine(self, models: Tensor, shares: Tensor) -> Tensor:
        """Return θ = Σ_k a_k v_k for v (k, num_weights) and a by block (k, B)."""
        return (self.spread(shares) * models).sum(dim=0)

    def of_parameters(self, model: FlatModel) -> "Blocks":
        """Return the blocks of the parameters alone."""
        return Blocks(self.of_weight[: model.num_parameters])


def whole_model(model: FlatModel) -> Blocks:
    """Return all weights as one block."""
    return _numbered(model, {})


def layers(model: FlatModel) -> Blocks:
    """Return a block for each layer and one for the head.

    A layer is a child of the model other than its head; the children of a
    `torch.nn.Sequential` or a `torch.nn.ModuleList` count as children of the model. A
    child with vectors only, such as a normalisation, belongs to the layer before it.
    """
    # Number 0: weights of the model itself, outside of any layer.
    number_of, number = dict[nn.Module, int](), 1
    head, layers = model.module.classifier, list[nn.Module]()
    for child in model.module.children():
        if child is not head:
            layers += child.children() if _is_list(child) else (child,)
    for layer in (*layers, head):
        has_matrix = any(tensor.dim() > 1 for tensor in layer.parameters())
        number += has_matrix or layer is head
        number_of |= dict.fromkeys(layer.modules(), number)
    return _numbered(model, number_of)


def stages(model: FlatModel) -> Blocks:
    """Return a block for each stage and one for the head.

    A stage is a child of the model that is a `torch.nn.Sequential` or a
    `torch.nn.ModuleList`, together with the children between it and the stage before:
    the first stage of ResNet-18 includes convolution and normalisation of the stem.
    Children behind the last stage form a block, as do weights of the model itself.
    """
    number_of, number = dict[nn.Module, int](), 1
    for child in model.module.children():
        if child is not model.module.classifier:
            number_of |= dict.fromkeys(child.modules(), number)
            number += _is_list(child)
    head = model.module.classifier.modules()
    return _numbered(model, number_of | dict.fromkeys(head, number + 1))


def _numbered(model: FlatModel, number_of: Mapping[nn.Module, int]) -> Blocks:
    """Make blocks in the order of the modules' numbers; 0 for unnumbered weights."""
    layers = [
        torch.full((entry.stop - entry.start,), number_of.get(entry.module, 0))
        for entry in model.entries
    ]
    _, numbers = torch.unique(torch.cat(layers), return_inverse=True)
    return Blocks(numbers.to(model.device))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)
