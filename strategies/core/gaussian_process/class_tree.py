"""A binary tree over the classes of a client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_PASSES = 100


@dataclass(frozen=True)
class Split:
    """An inner node: which of two groups of classes it is.

    Attributes
    ----------
    depth
        0 at the root.
    left, right
        Disjoint, each of at least one class.
    """

    depth: int
    left: tuple[int, ...]
    right: tuple[int, ...]

    def signs(self, num_classes: int) -> Tensor:
        """Return 1 for classes on the left, -1 on the right, else 0: (num_classes,)."""
        signs = torch.zeros(num_classes, dtype=torch.float64)
        signs[list(self.left)], signs[list(self.right)] = 1.0, -1.0
        return signs


@dataclass(frozen=True)
class ClassTree:
    """A binary tree with a class at each leaf.

    Attributes
    ----------
    classes
        At the leaves, ascending.
    splits
        The inner nodes, one less than classes; parents come before their children.
    """

    classes: tuple[int, ...]
    splits: tuple[Split, ...]

    @property
    def depth(self) -> int:
        """The number of levels of inner nodes."""
        return max((split.depth + 1 for split in self.splits), default=0)


def class_tree(embeddings: Tensor, labels: Tensor) -> ClassTree:
    """Return the tree that splits the class means in two, again and again.

    Achituve, Navon, Yemini, Chechik, Fetaya, "GP-Tree: A Gaussian Process Classifier
    for Few-Shot Incremental Learning", ICML 2021, section 4.1: 2-means of the class
    means, top down. Departure: it starts from the two means that are farthest apart,
    where the paper draws two at random: the same data give the same tree.

    Parameters
    ----------
    embeddings, labels
        Shapes (n, p) and (n,).
    """
    means = {
        label: embeddings[labels == label].double().mean(dim=0)
        for label in sorted(set(labels.tolist()))
    }
    return ClassTree(tuple(means), tuple(_splits(tuple(means), means, 0)))


def _splits(
    classes: Sequence[int], means: Mapping[int, Tensor], depth: int
) -> Iterator[Split]:
    if len(classes) < 2:
        return
    is_left = _two_means(torch.stack([means[label] for label in classes])).tolist()
    pairs = list(zip(classes, is_left, strict=True))
    left = tuple(label for label, on_left in pairs if on_left)
    right = tuple(label for label, on_left in pairs if not on_left)
    yield Split(depth, left, right)
    yield from _splits(left, means, depth + 1)
    yield from _splits(right, means, depth + 1)


def _two_means(points: Tensor) -> Tensor:
    """Return which of k ≥ 2 points, shape (k, p), are in the first of two clusters.

    Both have members. Points that are all the same are halved in their order.
    """
    distances = torch.cdist(points, points)
    centers = points[list(divmod(int(distances.argmax()), len(points)))]
    for _ in range(_MAX_PASSES):
        to_first, to_second = torch.cdist(points, centers).T
        is_left: Tensor = to_first <= to_second
        if bool(is_left.all()) or not bool(is_left.any()):
            return torch.arange(len(points)) < (len(points) + 1) // 2
        before = centers
        centers = torch.stack([points[is_left].mean(0), points[~is_left].mean(0)])
        if torch.equal(centers, before):
            break
    return is_left
