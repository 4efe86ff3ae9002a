"""Points in groups: k-means."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.data.examples import Examples
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import denominator
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd

_MAX_ITERATIONS = 50


def clusters(points: Tensor, count: int, rng: RandomKey) -> Tensor:
    """Return the cluster of each point, int64 of shape (n,); none is empty.

    Lloyd's iterations. The first centre is drawn, each further one is the point that
    is farthest from those before it.

    ``points``: Shape (n, d). Raises ValueError if there are fewer points than
    clusters.
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


# What is held in float64 at once, of each vector.
_SLICE = 2**13


@dataclass(frozen=True)
class Bipartition:
    """Two parts of a set."""

    # first, second: Positions of the members of each, neither of them empty; the member
    # at 0 is in the first.
    first: tuple[int, ...]
    second: tuple[int, ...]
    # α_cross, the largest similarity of two members in different parts.
    cross_similarity: float


def cosines(vectors: Tensor) -> Tensor:
    """Return the cosines of all pairs of vectors, float64 of shape (n, n).

    Those of parallel vectors are 1 but for the rounding of float64. With a vector of 0
    they are 0.

    ``vectors``: float32, shape (n, d).
    """
    products = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for part in torch.split(vectors, _SLICE, dim=1):
        exact = part.double()
        products.addmm_(exact, exact.T)
    norms = products.diagonal().sqrt()
    return products / denominator(torch.outer(norms, norms))


def bipartition(similarities: Tensor) -> Bipartition:
    """Return the two parts whose largest cross similarity is the smallest possible.

    The paper merges the most similar members until two parts are left. Here a part
    grows from the first member, always by the one that is most similar to any in it,
    and the order is cut where that similarity was smallest. Whatever two parts are
    made, growing crosses from one to the other in some step, by their largest cross
    similarity at most; the cut has the smallest of all steps, so none is better.

    ``similarities``: α, symmetric, shape (n, n) with n of at least 2. Raises
    ValueError: if there are fewer than two members.
    """
    num_members = len(similarities)
    if num_members < 2:
        raise ValueError(f"expected at least 2 members to part, found {num_members}")
    order, gains = [0], []
    closeness = similarities[0].clone()
    for _ in range(num_members - 1):
        closeness[order[-1]] = -torch.inf
        gain, nearest = closeness.max(dim=0)
        order.append(int(nearest))
        gains.append(float(gain))
        taken = closeness == -torch.inf
        closeness = torch.maximum(closeness, similarities[int(nearest)])
        closeness[taken] = -torch.inf
    cut = gains.index(min(gains)) + 1
    return Bipartition(tuple(order[:cut]), tuple(order[cut:]), gains[cut - 1])


@dataclass(frozen=True)
class ClusterModels(Record):
    """Models on their way to a client."""

    # Of the clusters that the client may choose from, or of its own alone: tensors of
    # shape (num_weights,), at least one.
    models: tuple[Tensor, ...]
    numbers: tuple[int, ...]  # Which cluster each of them belongs to
    default: int  # The position of the model that a client without data is served


@dataclass(frozen=True)
class ClusterUpdate(ModelUpdate):
    """One trained model on its way to the server."""

    cluster: int  # The number of the cluster whose model was trained


def best_position(task: Task, payload: ClusterModels, parts: Sequence[Examples]) -> int:
    """Return the position of the model with the lowest mean loss; ties to the first."""
    if len(payload.models) == 1:
        return 0
    if not any(map(len, parts)):
        return payload.default
    losses = [
        sum(_loss_sum(task, weights, part) for part in parts)
        for weights in payload.models
    ]
    return losses.index(min(losses))


def train_best(
    task: Task,
    payload: ClusterModels,
    parts: Sequence[Examples],
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
) -> ClusterUpdate:
    """Return the model that is best on ``parts``, trained on ``examples``."""
    position = best_position(task, payload, parts)
    trained = local_sgd(task, payload.models[position], examples, learning_rate, rng)
    return ClusterUpdate(
        weights=trained.weights,
        num_examples=len(examples),
        train_loss=trained.train_loss,
        cluster=payload.numbers[position],
    )


def cluster_problem(payload: ClusterModels, update: ClusterUpdate) -> str | None:
    """Return why an update is of none of the models that were sent; None if it is."""
    if update.cluster not in payload.numbers:
        known = ", ".join(map(str, payload.numbers))
        return f"cluster: expected one of {known}, found {update.cluster}"
    expected, found = tuple(payload.models[0].shape), tuple(update.weights.shape)
    if found != expected:
        return f"weights: expected shape {expected}, found {found}"
    return None


def chosen_model(payload: ClusterModels, update: ClusterUpdate) -> dict[str, Tensor]:
    """Return what the weights of an update started from."""
    return {"weights": payload.models[payload.numbers.index(update.cluster)]}


def serve_best(
    task: Task, payload: ClusterModels, parts: Sequence[Examples]
) -> ModelPredictor:
    """Return the predictor of the model that is best on ``parts``."""
    position = best_position(task, payload, parts)
    chosen = {"cluster": float(payload.numbers[position])}
    return ModelPredictor(task, payload.models[position], chosen)


def _loss_sum(task: Task, weights: Tensor, examples: Examples) -> float:
    """Return the sum of the model's losses; infinite where it is not defined."""
    loss = task.loss_sum(weights, examples)
    return float(torch.nan_to_num(loss, nan=torch.inf, posinf=torch.inf))
