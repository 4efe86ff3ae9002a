"""The loss that trains a representation for a tree of Gaussian processes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.models.base import EmbeddingModel
from strategies.core.gaussian_process.class_tree import ClassTree
from strategies.core.gaussian_process.kernel import Kernel
from strategies.core.gaussian_process.posterior import posterior
from strategies.core.gaussian_process.quadrature import log_expected_sigmoid
from strategies.core.local_model import Objective


@dataclass(frozen=True)
class Levels:
    """A tree as one table: what a class decides on each level, and with whom.

    Attributes
    ----------
    signs
        1 left, -1 right, 0 below its leaf: float64 of shape (depth, num_classes).
    nodes
        Number of the inner node, int64 of shape (depth, num_classes).
    """

    signs: Tensor
    nodes: Tensor


def levels_of(tree: ClassTree, num_classes: int, device: torch.device) -> Levels:
    """Return the table of ``tree``, on ``device``."""
    signs = torch.zeros(tree.depth, num_classes, dtype=torch.float64)
    nodes = torch.full((tree.depth, num_classes), -1)
    for number, split in enumerate(tree.splits):
        signs[split.depth] += split.signs(num_classes)
        nodes[split.depth, [*split.left, *split.right]] = number
    return Levels(signs.to(device), nodes.to(device))


def predictive_objective(
    levels: Levels, kernel: Kernel, num_iterations: int
) -> Objective:
    """Return -log p(y | x, the rest of the mini-batch) of each example.

    Parameters
    ----------
    levels
        The client's tree.
    kernel
        Between representations.
    num_iterations
        See `posterior`.
    """

    def losses(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
        embeddings = module.embed(inputs)
        covariance = kernel.matrix(embeddings, embeddings)
        return predictive_losses(levels, covariance, labels, num_iterations)

    return losses


def predictive_losses(
    levels: Levels, covariance: Tensor, labels: Tensor, num_iterations: int
) -> Tensor:
    """Return -Σ log p(branch) over the nodes on the way to each label, shape (n,).

    Each branch is predicted from the other examples below the same node. The nodes of
    a level have no example in common, so they are one Gaussian process whose
    covariance is zero between them, and all levels are solved at once.

    Parameters
    ----------
    levels
        The tree.
    covariance
        Between the examples, float64 of shape (n, n).
    labels
        int64, shape (n,).
    num_iterations
        See `posterior`.
    """
    signs, nodes = levels.signs[:, labels], levels.nodes[:, labels]
    same_node = nodes[:, :, None] == nodes[:, None, :]
    found = posterior(covariance * same_node, signs, num_iterations)
    mean, variance = found.left_out()
    log_likelihood = signs.abs() * log_expected_sigmoid(signs * mean, variance)
    return -log_likelihood.sum(dim=0).float()
