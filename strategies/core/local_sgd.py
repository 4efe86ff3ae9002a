"""The one loop in which a client trains a model."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnper.config.sections import TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.examples import Examples
from strategies.core.local_model import (
    GradientHook,
    LocalModel,
    Objective,
    cross_entropy,
    head_cross_entropy,
)
from strategies.core.mini_batches import mini_batches, steps_per_epoch
from strategies.core.task import Task

LocalStep = Callable[[LocalModel], Tensor]
"""One step of a client's training: ``local_model -> loss``, a scalar."""


@dataclass(frozen=True)
class LocalResult:
    """What local training ends with.

    Attributes
    ----------
    weights
        The trained weights, shape (num_weights,); the given ones if nothing was done.
    num_steps
        K, the steps that were made.
    train_loss
        Mean loss over the steps, as each one saw it first; NaN without a step.
    """

    weights: Tensor
    num_steps: int
    train_loss: float


def sgd_step(model: LocalModel) -> Tensor:
    """Make one step of SGD on the next mini-batch; return its loss before."""
    loss = model.backward(model.next_batch())
    model.step()
    return loss


def local_sgd(  # noqa: PLR0913 (the functions are how methods differ)
    task: Task,
    weights: Tensor,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
    *,
    num_epochs: int | None = None,
    gradient_hook: GradientHook | None = None,
    example_weights: Tensor | None = None,
    trainable: Tensor | None = None,
    objective: Objective = cross_entropy,
    local_step: LocalStep = sgd_step,
) -> LocalResult:
    """Train from ``weights`` on ``examples`` with mini-batch SGD.

    Parameters
    ----------
    task
        Model and training section: batch size, momentum, weight decay, augmentation,
        precision and length of the training.
    weights
        Where to start, shape (num_weights,).
    examples
        What to train on, n of them. With none, nothing is done.
    learning_rate
        η of this call; see `TrainingSettings.learning_rate_at`.
    rng
        Fixes the order of the examples, their augmentation and the model's own
        randomness (dropout).
    num_epochs
        Overrides the length that the training settings give; 0 leaves the weights.
    gradient_hook
        ``(gradient, parameters) -> None``, called after each backward pass with the
        flat gradient, to be changed in place, and the current flat parameters; both
        of shape (num_parameters,), on ``task.model.device``.
    example_weights
        Factor on the loss of each example, shape (n,). Each mini-batch's loss is the
        sum of the weighted losses divided by the number of its examples.
    trainable
        Which weights may change, bool of shape (num_weights,), as `FlatModel.mask`
        makes it; None is all. The others, buffers too, end as they were. A layer, or
        a container with all its layers and dropout, of which nothing is trained is in
        evaluation mode and costs no backward pass. Where it is the head alone, the
        body costs one forward pass in all, unless images are augmented or the model's
        losses need more of the inputs than their embeddings.
    objective
        What is minimised; by default the model's own losses, the cross-entropy of its
        logits.
    local_step
        What a step does; by default one of SGD on one mini-batch.
    """
    length = num_steps(task.training, num_epochs, len(examples))
    if trainable is not None and not bool(trainable[: task.model.num_parameters].any()):
        length = 0
    if length and _trains_the_head_alone(task, trainable, objective, local_step):
        # The body is as good as a part of the data then: one pass of it will do.
        embeddings = task.embed(weights, examples.images)
        examples = Examples(embeddings, examples.labels)
        task, objective = replace(task, normalize=_as_it_is), head_cross_entropy
    losses: list[Tensor] = []
    with _training(task, weights, trainable), rng.child("model").torch():
        model = LocalModel(
            task,
            examples,
            mini_batches(len(examples), task.training.batch_size, rng),
            mini_batches(len(examples), task.training.batch_size, rng.child("other")),
            rng.child("augmentation").numpy(),
            learning_rate,
            gradient_hook=gradient_hook,
            example_weights=example_weights,
            trainable=trainable,
            objective=objective,
        )
        losses.extend(local_step(model) for _ in range(length))
    trained = task.model.read()
    if trainable is not None:
        trained = torch.where(trainable, trained, weights)
    train_loss = float(torch.stack(losses).mean()) if losses else math.nan
    task.on_trained(len(losses), _effective_number(model.visited, example_weights))
    return LocalResult(trained, len(losses), train_loss)


def _effective_number(visited: Tensor, weights: Tensor | None) -> float:
    """Return how many examples were trained on, in equal ones: (Σ w_i)² / Σ w_i².

    Kish, "Survey Sampling", 1965, section 11.7: one that outweighs all others counts
    alone. ``visited`` and ``weights`` have shape (n,).
    """
    if weights is None:
        return float(visited.sum())
    used = weights[visited].double()
    squares = float((used**2).sum())
    return float(used.sum()) ** 2 / squares if squares else 0.0


def _trains_the_head_alone(
    task: Task, trainable: Tensor | None, objective: Objective, local_step: LocalStep
) -> bool:
    """Return whether what is trained sees no more of the data than its embeddings."""
    if trainable is None or bool((trainable & ~task.head_mask).any()):
        return False
    plain = objective is cross_entropy and local_step is sgd_step
    fixed = task.training.augmentation == "none"
    return plain and fixed and task.model.module.learns_from_embeddings


def _as_it_is(embeddings: Tensor) -> Tensor:
    """Return embeddings (n, p), which need not be normalised."""
    return embeddings


@contextlib.contextmanager
def _training(task: Task, weights: Tensor, trainable: Tensor | None) -> Iterator[None]:
    """Load the model and put it into training mode, but for what is not trained."""
    model = task.model
    model.load(weights)
    if not model.module.training:  # it walks through all layers
        model.module.train()
    if trainable is None:
        yield
        return
    with model.freezing(trainable):
        yield


def num_steps(
    training: TrainingSettings, num_epochs: int | None, num_examples: int
) -> int:
    """Return the steps of `local_sgd` on so many examples; ``num_epochs`` as there."""
    per_epoch = steps_per_epoch(num_examples, training.batch_size)
    if num_epochs is not None:
        return num_epochs * per_epoch
    if training.local_steps is not None:
        return training.local_steps if num_examples else 0
    return (training.local_epochs or 1) * per_epoch
