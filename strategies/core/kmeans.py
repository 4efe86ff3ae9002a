"""K-means of models, for methods that group clients."""

import torch
from torch import Tensor

from knnper.seeding import RandomKey

_MOST_ITERATIONS = 50


def clusters(points: Tensor, count: int, rng: RandomKey) -> Tensor:
    """Return the cluster of each of n points, int64 (n,), n at least ``count``.

    No cluster is empty.

    Lloyd's iterations. The first centre is drawn at random, and each further centre is
    the point farthest from those before it.
    """
    centres = points[_far_apart(points, count, rng)]
    previous = None
    for _ in range(_MOST_ITERATIONS):
        nearest = _none_empty(torch.cdist(points, centres))
        if previous is not None and torch.equal(nearest, previous):
            break
        centres = torch.stack(
            [points[nearest == cluster].mean(dim=0) for cluster in range(count)]
        )
        previous = nearest
    return nearest


def _far_apart(points: Tensor, count: int, rng: RandomKey) -> list[int]:
    chosen = [int(rng.numpy().integers(len(points)))]
    nearest = torch.full((len(points),), torch.inf)
    for _ in range(1, count):
        nearest = nearest.minimum(torch.cdist(points, points[chosen[-1:]])[:, 0])
        nearest[chosen] = -1.0  # choose no point twice, even if points coincide
        chosen.append(int(nearest.argmax()))
    return chosen


def _none_empty(distances: Tensor) -> Tensor:
    """Assign each point to its nearest centre, with at least one point for each centre.

    An empty cluster takes the point farthest from its centre, among the points that are
    not alone in their cluster.
    """
    nearest, count = distances.argmin(dim=1), distances.shape[1]
    for cluster in range(count):
        sizes = torch.bincount(nearest, minlength=count)
        if sizes[cluster] > 0:
            continue
        to_centre = distances.gather(1, nearest[:, None])[:, 0]
        to_centre = to_centre.where(sizes[nearest] > 1, -1.0)
        nearest[to_centre.argmax()] = cluster
    return nearest
