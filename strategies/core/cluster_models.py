"""Several models of which each client takes one: that of its cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.config.seeding import RandomKey
from knnper.data.examples import Examples
from strategies.core.local_sgd import local_sgd
from strategies.core.model_predictor import ModelPredictor
from strategies.core.records import ModelUpdate, Record
from strategies.core.task import Task


@dataclass(frozen=True)
class ClusterModels(Record):
    """Models on their way to a client.

    Attributes
    ----------
    models
        Of the clusters that the client may choose from, or of its own alone: tensors
        of shape (num_weights,), at least one.
    numbers
        Which cluster each of them belongs to.
    default
        The position of the model that a client without data is served.
    """

    models: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    default: int


@dataclass(frozen=True)
class ClusterUpdate(ModelUpdate):
    """One trained model on its way to the server.

    Attributes
    ----------
    weights, num_examples, train_loss
        See `ModelUpdate`.
    cluster
        The number of the cluster whose model was trained.
    """

    cluster: int


def best_position(task: Task, payload: ClusterModels, parts: Sequence[Examples]) -> int:
    """Return the position of the model with the lowest mean loss; ties to the first.

    Parameters
    ----------
    task
        Gives the architecture; the models are in evaluation mode.
    payload
        The models. A single one is taken without a look.
    parts
        What the loss is the mean over, together. Without any example it is the
        payload's default.
    """
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
