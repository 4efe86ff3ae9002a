"""Several models at once, on their way between server and clients, and their means."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.config.seeding import RandomKey
from strategies.core.averaging import RunningMean
from strategies.core.clusters import clusters
from strategies.core.records import Record


@dataclass(frozen=True)
class BasesState(Record):
    """The server's state.

    Attributes
    ----------
    models
        One in the warm start; then v' if there is one, v_1 ... v_K. Tensors of shape
        (num_weights,).
    num_rounds
        Rounds that are done.
    seed
        Of the clusters at the end of the warm start.
    """

    models: tuple[Tensor, ...]
    num_rounds: int
    seed: int


@dataclass(frozen=True)
class Bases(Record):
    """What every client gets.

    Attributes
    ----------
    models
        See `BasesState`.
    """

    models: tuple[Tensor, ...]


@dataclass(frozen=True)
class BasesUpdate(Record):
    """What a client sends back.

    Attributes
    ----------
    models
        The trained models, in the order of `BasesState`.
    num_examples, train_loss
        See `Update`.
    """

    models: tuple[Tensor, ...]
    num_examples: int
    train_loss: float


def mean_models(updates: Iterable[BasesUpdate]) -> tuple[Tensor, ...]:
    """Return the mean of each model, each update weighted by its examples."""
    means: list[RunningMean] = []
    for update in updates:
        means = means or [RunningMean() for _ in update.models]
        for mean, weights in zip(means, update.models, strict=True):
            mean.add(weights, update.num_examples)
    return tuple(mean.result() for mean in means)


def clustered(
    updates: Sequence[BasesUpdate], center: Tensor, count: int, rng: RandomKey
) -> tuple[Tensor, ...]:
    """Return the means of the updates' models in ``count`` clusters.

    Parameters
    ----------
    updates
        Of one model each.
    center
        Any point amid the models' parameters, shape (num_parameters,): differences
        from it are small, and so more exact. Buffers are not compared.
    count
        Clusters, at most as many as updates.
    rng
        Fixes the clusters.
    """
    first = slice(0, len(center))
    moved = torch.stack([update.models[0][first] - center for update in updates])
    found = clusters(moved, count, rng).tolist()
    groups = [
        [update for update, its in zip(updates, found, strict=True) if its == cluster]
        for cluster in range(count)
    ]
    return tuple(mean_models(group)[0] for group in groups)
