"""Models that are convex combinations of others, block by block.

fedbasis-pflbed.txt, Eqs. 4 and 8 and section 4.4, "Layer-wise combinations".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from knnper.config.sections import TrainingSettings
from knnper.models.base import EmbeddingModel
from knnper.models.flat import FlatModel


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which weights share a coefficient.

    Attributes
    ----------
    of_weight
        The block of each weight, int64 of shape (num_weights,), on the model's device;
        numbers from 0 on without a gap.
    """

    of_weight: Tensor

    @cached_property
    def num_blocks(self) -> int:
        """B."""
        return int(self.of_weight.max()) + 1

    @cached_property
    def _runs(self) -> tuple[list[int], list[int]]:
        blocks, sizes = torch.unique_consecutive(self.of_weight, return_counts=True)
        return blocks.tolist(), sizes.tolist()

    def spread(self, values: Tensor) -> Tensor:
        """Return each weight's value, (..., num_weights), of its block's (..., B)."""
        return values[..., self.of_weight]

    def sums(self, products: Tensor) -> Tensor:
        """Return the sums over each block, (..., B), of products (..., num_weights)."""
        blocks, sizes = self._runs
        sums = products.new_zeros((*products.shape[:-1], self.num_blocks))
        parts = torch.split(products, sizes, dim=-1)
        for block, part in zip(blocks, parts, strict=True):
            sums[..., block] += part.sum(dim=-1)
        return sums

    def combine(self, models: Tensor, shares: Tensor) -> Tensor:
        """Return θ = Σ_k a_k v_k, shape (num_weights,).

        Parameters
        ----------
        models
            v_k, shape (k, num_weights).
        shares
            a_k of each block, shape (k, B).
        """
        return (self.spread(shares) * models).sum(dim=0)

    def of_parameters(self, model: FlatModel) -> "Blocks":
        """Return the blocks of the parameters alone."""
        return Blocks(self.of_weight[: model.num_parameters])

    def among(self, weights: Tensor) -> list[int]:
        """Return the blocks that some of ``weights`` belong to, a bool mask."""
        chosen: list[int] = torch.unique(self.of_weight[weights]).tolist()
        return chosen


def whole_model(model: FlatModel) -> Blocks:
    """Return all weights as one block."""
    numbers = torch.zeros(model.num_weights, dtype=torch.int64)
    return Blocks(numbers.to(model.device))


def layers(model: FlatModel) -> Blocks:
    """Return a block for each layer and one for the head.

    A layer is a child of the model other than its head; a child that is a
    `torch.nn.Sequential` or a `torch.nn.ModuleList` stands for its own children. One
    that owns only vectors, as a normalisation does, belongs to the layer before it.
    """
    # What the model owns itself, outside of any layer, is a block of its own: 0.
    number_of, number = dict[nn.Module, int](), 1
    for layer in _layers(model.module):
        has_matrix = any(tensor.dim() > 1 for tensor in layer.parameters())
        number += has_matrix or layer is model.module.classifier
        number_of |= dict.fromkeys(layer.modules(), number)
    return _numbered(model, number_of)


def stages(model: FlatModel) -> Blocks:
    """Return a block for each stage and one for the head.

    A stage is a child of the model that is a `torch.nn.Sequential` or a
    `torch.nn.ModuleList`, with what the model defines between it and the one before:
    ResNet-18's first has the convolution and normalisation of the stem. What comes
    behind the last is a block of its own, as is what the model owns itself.
    """
    number_of, number = dict[nn.Module, int](), 1
    for child in model.module.children():
        if child is not model.module.classifier:
            number_of |= dict.fromkeys(child.modules(), number)
            number += _is_list(child)
    head = model.module.classifier.modules()
    return _numbered(model, number_of | dict.fromkeys(head, number + 1))


def _numbered(model: FlatModel, number_of: Mapping[nn.Module, int]) -> Blocks:
    """Return the blocks in the order of their numbers; 0 is what is in no module."""
    found = [
        torch.full((entry.stop - entry.start,), number_of.get(entry.module, 0))
        for entry in model.entries
    ]
    _, numbers = torch.unique(torch.cat(found), return_inverse=True)
    return Blocks(numbers.to(model.device))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _layers(module: EmbeddingModel) -> Iterable[nn.Module]:
    for child in module.children():
        if child is module.classifier:
            continue
        yield from child.children() if _is_list(child) else (child,)
    yield module.classifier


def bases_after(
    bases: Tensor, shares: Tensor, combined: Tensor, trained: Tensor, kept: float
) -> Tensor:
    """Return where SGD on all bases ends, from where it took their combination.

    With θ = Σ_k a_k v_k and fixed a_k, the gradient of v_k is a_k g with g = ∇L(θ)
    (Eq. 8). A step of SGD is linear in weights and gradients, with momentum and weight
    decay too: after several, v_k = ρ v_k(0) + a_k s, where ρ is what decay alone leaves
    and s, the same for all, sums up the g. So θ = ρ θ(0) + c s with c = Σ_k a_k²:
    training θ alone, its gradient times c, gives s and with it all bases.

    Parameters
    ----------
    bases
        v_k(0), shape (k, num_parameters).
    shares
        a_k of each parameter, shape (k, num_parameters).
    combined, trained
        θ before and after, shape (num_parameters,).
    kept
        ρ, see `kept_by_decay`.
    """
    total = (trained - kept * combined) / shares.square().sum(dim=0)
    return kept * bases + shares * total


def kept_by_decay(
    training: TrainingSettings, learning_rate: float, num_steps: int
) -> float:
    """Return ρ, what SGD's weight decay leaves of a weight without a gradient."""
    kept, velocity = 1.0, 0.0
    for _ in range(num_steps):
        velocity = training.momentum * velocity + training.weight_decay * kept
        kept -= learning_rate * velocity
    return kept
