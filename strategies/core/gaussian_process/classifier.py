"""A tree of binary Gaussian processes: the probabilities of all classes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.core.gaussian_process.class_tree import ClassTree, Split, class_tree
from strategies.core.gaussian_process.kernel import Kernel
from strategies.core.gaussian_process.posterior import Posterior, posterior
from strategies.core.gaussian_process.quadrature import log_expected_sigmoid

_SMALLEST = 1e-12
_QUERIES_AT_ONCE = 1024


@dataclass(frozen=True)
class Node:
    """The Gaussian process of an inner node.

    Attributes
    ----------
    split
        What it tells apart.
    embeddings
        Of the n examples below it, shape (n, p).
    kernel
        Between representations.
    posterior
        q(f) at the examples.
    """

    split: Split
    embeddings: Tensor
    kernel: Kernel
    posterior: Posterior

    def log_branches(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(left) and log p(right), shape (m,), of queries (m, p)."""
        mean, variance = self.posterior.elsewhere(
            self.kernel.matrix(self.embeddings, queries), self.kernel.diagonal(queries)
        )
        left = log_expected_sigmoid(mean, variance)
        return left, log_expected_sigmoid(-mean, variance)


@dataclass(frozen=True)
class TreeClassifier:
    """p(y|x) from representations.

    Attributes
    ----------
    num_examples
        n, that it learnt from.
    num_classes
        c, of the task.
    tree
        Over the classes among the examples.
    nodes
        One a split of the tree, in its order.
    """

    num_examples: int
    num_classes: int
    tree: ClassTree
    nodes: tuple[Node, ...]

    def __call__(self, queries: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (m, c), of representations (m, p).

        A class is as likely as all branches on the way to it. Those that are not among
        the examples share 1 / (n + 1), the probability that the next draw of a Chinese
        restaurant process with concentration 1 is new: without examples, all of it.
        """
        parts = torch.split(queries, _QUERIES_AT_ONCE)  # n covariances each
        known = torch.cat([self._among_known(part) for part in parts])
        return (known * self._shares()).clamp_min(_SMALLEST).float()

    def _among_known(self, queries: Tensor) -> Tensor:
        """Return p(class | it is of the tree), (m, c); 1 for those outside of it."""
        log_paths = torch.zeros(len(queries), self.num_classes, dtype=torch.float64)
        for node in self.nodes:
            left, right = node.log_branches(queries)
            log_paths[:, list(node.split.left)] += left[:, None]
            log_paths[:, list(node.split.right)] += right[:, None]
        return log_paths.exp()

    def _shares(self) -> Tensor:
        """Return p(known) for known classes, a share of p(new) for others: (c,)."""
        num_new = self.num_classes - len(self.tree.classes)
        if num_new == 0:
            return torch.ones(self.num_classes, dtype=torch.float64)
        of_new = 1 / (self.num_examples + 1)
        shares = torch.full((self.num_classes,), of_new / num_new, dtype=torch.float64)
        shares[list(self.tree.classes)] = 1 - of_new
        return shares


def fit_classifier(
    embeddings: Tensor,
    labels: Tensor,
    num_classes: int,
    kernel: Kernel,
    num_iterations: int,
) -> TreeClassifier:
    """Return the classifier that has learnt from n examples.

    O(n³) at the root, and less in every node below it, where fewer examples are.

    Parameters
    ----------
    embeddings, labels
        Shapes (n, p) and (n,); there may be none.
    num_classes
        c, of the task.
    kernel
        Between representations.
    num_iterations
        See `posterior`.
    """

    def fitted(split: Split) -> Node:
        signs = split.signs(num_classes)[labels]
        below = signs != 0
        points = embeddings[below]
        covariance = kernel.matrix(points, points)
        found = posterior(covariance, signs[below], num_iterations)
        return Node(split, points, kernel, found)

    tree = class_tree(embeddings, labels)
    nodes = tuple(fitted(split) for split in tree.splits)
    return TreeClassifier(len(labels), num_classes, tree, nodes)
