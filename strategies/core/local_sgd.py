"""The one loop in which a client trains a model."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from knnper.config.sections import TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.augmentation import AUGMENTATIONS
from knnper.data.examples import Examples
from strategies.core.task import Task

GradientHook = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class LocalResult:
    """What local training ends with.

    Attributes
    ----------
    weights
        The trained weights, shape (num_weights,); the given ones if nothing was done.
    num_steps
        K, the optimizer steps that were made.
    train_loss
        Mean loss over the mini-batches, before each one's step; NaN without a step.
    """

    weights: Tensor
    num_steps: int
    train_loss: float


def local_sgd(  # noqa: PLR0913 (the hooks are how methods differ)
    task: Task,
    weights: Tensor,
    examples: Examples,
    learning_rate: float,
    rng: RandomKey,
    *,
    num_epochs: int | None = None,
    gradient_hook: GradientHook | None = None,
    example_weights: Tensor | None = None,
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
    """
    model, training, device = task.model, task.training, task.model.device
    model.load(weights)
    if not model.module.training:  # it walks through all layers
        model.module.train()
    optimizer = torch.optim.SGD(
        [model.parameters],
        lr=learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        fused=True,
    )
    here = Examples(examples.images.to(device), examples.labels.to(device))
    factors = None if example_weights is None else example_weights.to(device)
    augment = AUGMENTATIONS[training.augmentation]
    generator = rng.child("augmentation").numpy()
    losses: list[Tensor] = []
    with rng.child("model").torch():
        for positions in _mini_batches(len(examples), training, num_epochs, rng):
            chosen = positions.to(device)
            batch = here.take(chosen)
            batch = Examples(augment(batch.images, generator), batch.labels)
            loss = _mean_loss(task, batch, None if factors is None else factors[chosen])
            model.gradient.zero_()
            loss.backward()  # type: ignore[no-untyped-call]
            if gradient_hook is not None:
                gradient_hook(model.gradient, model.parameters.detach())
            optimizer.step()
            losses.append(loss.detach())
    train_loss = float(torch.stack(losses).mean()) if losses else math.nan
    return LocalResult(model.read(), len(losses), train_loss)


def _mean_loss(task: Task, batch: Examples, factors: Tensor | None) -> Tensor:
    with task.autocast():
        logits = task.model.module(task.normalize(batch.images)).float()
    losses = functional.cross_entropy(logits, batch.labels, reduction="none")
    return (losses if factors is None else losses * factors).mean()


def _mini_batches(
    num_examples: int,
    training: TrainingSettings,
    num_epochs: int | None,
    rng: RandomKey,
) -> Iterator[Tensor]:
    """Yield the positions of each mini-batch, int64 of shape (batch,).

    Each epoch is a new permutation. The incomplete last batch is left out when a full
    one came before it: a batch of one or two ruins BatchNorm's statistics.
    """
    if num_examples == 0:
        return
    size = min(training.batch_size, num_examples)
    per_epoch = num_examples // size
    num_steps = _num_steps(training, num_epochs, per_epoch)
    shuffler = rng.child("batches").numpy()
    order = np.empty(0, dtype=np.int64)
    for step in range(num_steps):
        place = step % per_epoch
        if place == 0:
            order = shuffler.permutation(num_examples)
        yield torch.from_numpy(order[place * size : (place + 1) * size])


def _num_steps(
    training: TrainingSettings, num_epochs: int | None, steps_per_epoch: int
) -> int:
    if num_epochs is not None:
        return num_epochs * steps_per_epoch
    if training.local_steps is not None:
        return training.local_steps
    return (training.local_epochs or 1) * steps_per_epoch
