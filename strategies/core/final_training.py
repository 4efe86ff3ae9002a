"""Training after the rounds, on a client's training and validation splits.

A memory on top of such a model still chooses λ on the validation split, and must not
score a model that was trained on it. `on_both_splits` therefore also provides the model
trained in the same way on the training split alone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Required, TypedDict, TypeVar, Unpack

from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.strategies.core.predictors import HeadPredictor, ModelPredictor
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import GradientHook, local_sgd

AnyPredictor = TypeVar("AnyPredictor", ModelPredictor, HeadPredictor)


def on_both_splits(
    data: ClientData, train: Callable[[Examples], AnyPredictor]
) -> AnyPredictor:
    """Train on both splits; `without_validation` trains on the training split alone."""
    served = train(data.train_and_validation())
    if len(data.validation) == 0:
        return served
    return replace(served, trained_alone=lambda: train(data.train))


class SgdOptions(TypedDict, total=False):
    """Options that `trained_on_both_splits` passes to `local_sgd`."""

    learning_rate: Required[float]
    num_epochs: int | None
    gradient_hook: GradientHook | None
    trainable: Tensor | None


def trained_on_both_splits(
    task: Task,
    weights: Tensor,
    data: ClientData,
    rng: RandomKey,
    **options: Unpack[SgdOptions],
) -> ModelPredictor:
    """Train one model on both splits by `local_sgd`; see `on_both_splits`.

    The model stays at the client, so it is trained without `ExamplePrivacySettings`.
    """
    locally = replace(task, training=replace(task.training, example_privacy=None))

    def train(examples: Examples) -> ModelPredictor:
        trained = local_sgd(locally, weights, examples, rng=rng, **options)
        return ModelPredictor(task, trained.weights)

    return on_both_splits(data, train)
