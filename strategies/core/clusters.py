"""Points in groups: k-means."""

import torch
from torch import Tensor

from knnper.config.seeding import RandomKey

_MAX_ITERATIONS = 50


def clusters(points: Tensor, count: int, rng: RandomKey) -> Tensor:
    """Return the cluster of each point, int64 of shape (n,); none is empty.

    Lloyd's iterations. The first centre is drawn, each further one is the point that
    is farthest from those before it.

    Parameters
    ----------
    points
        Shape (n, d).
    count
        Clusters, at most n.
    rng
        Fixes the first centre.

    Raises
    ------
    ValueError
        If there are fewer points than clusters.
    """
    if len(points) < count:
        raise ValueError(f"expected at least {count} points, found {len(points)}")
    centres = points[_far_apart(points, count, rng)]
    previous = None
    for _ in range(_MAX_ITERATIONS):
        found = _none_empty(torch.cdist(points, centres))
        if previous is not None and torch.equal(found, previous):
            break
        centres = torch.stack(
            [points[found == cluster].mean(dim=0) for cluster in range(count)]
        )
        previous = found
    return found


def _far_apart(points: Tensor, count: int, rng: RandomKey) -> list[int]:
    chosen = [int(rng.numpy().integers(len(points)))]
    nearest = torch.full((len(points),), torch.inf)
    for _ in range(1, count):
        nearest = nearest.minimum(torch.cdist(points, points[chosen[-1:]])[:, 0])
        nearest[chosen] = -1.0  # points may coincide; the same one must not come twice
        chosen.append(int(nearest.argmax()))
    return chosen


def _none_empty(distances: Tensor) -> Tensor:
    """Return the nearest centre of each point, where every centre gets one.

    An empty cluster takes the point that is farthest from its own centre, among those
    that are not the last of theirs.
    """
    nearest, count = distances.argmin(dim=1), distances.shape[1]
    for cluster in range(count):
        sizes = torch.bincount(nearest, minlength=count)
        if sizes[cluster] > 0:
            continue
        own = distances.gather(1, nearest[:, None])[:, 0]
        own = own.where(sizes[nearest] > 1, -1.0)
        nearest[own.argmax()] = cluster
    return nearest
