"""What a client trains once the rounds are over and nothing is left to choose.

It then learns from both of its splits. Whatever comes on top and chooses on the
validation split, as a memory chooses λ, must not ask a model that has seen it: it gets
the one that was trained in the same way on the training split alone.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from knnper.config.seeding import RandomKey
from knnper.data.examples import ClientData, Examples
from strategies.core.local_model import GradientHook
from strategies.core.local_sgd import local_sgd
from strategies.core.model_predictor import ModelPredictor
from strategies.core.task import Task


def newcomer_rate(task: Task) -> float:
    """Return the learning rate of a client that begins when the rounds are over.

    The first round's: that of the last may be a hundredth of it, which is for weights
    that are trained already and would hardly move others.
    """
    return task.training.learning_rate_at(1)


def on_both_splits(
    data: ClientData, train: Callable[[Examples], ModelPredictor]
) -> ModelPredictor:
    """Return what is served of a client that trains now.

    Parameters
    ----------
    data
        The client's.
    train
        From examples to the predictor that was trained on them; chooses nothing.
    """
    served = train(data.train_and_validation())
    if len(data.validation) == 0:
        return served
    return replace(served, trained_alone=lambda: train(data.train))


def trained_on_both_splits(  # noqa: PLR0913 (as `local_sgd`)
    task: Task,
    weights: Tensor,
    data: ClientData,
    rng: RandomKey,
    *,
    num_epochs: int,
    learning_rate: float,
    gradient_hook: GradientHook | None = None,
    trainable: Tensor | None = None,
) -> ModelPredictor:
    """Return what is served of a client that trains one model by SGD now.

    Parameters
    ----------
    task
        Model and training section.
    weights
        Where to start, shape (num_weights,).
    data
        The client's.
    rng, num_epochs, learning_rate, gradient_hook, trainable
        Of this training, see `local_sgd`.
    """

    def train(examples: Examples) -> ModelPredictor:
        trained = local_sgd(
            task,
            weights,
            examples,
            learning_rate,
            rng,
            num_epochs=num_epochs,
            gradient_hook=gradient_hook,
            trainable=trainable,
        )
        return ModelPredictor(task, trained.weights)

    return on_both_splits(data, train)
