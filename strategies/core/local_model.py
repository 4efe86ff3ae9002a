"""The model while a client trains it: its mini-batches, gradients and steps."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.augmentation import AUGMENTATIONS
from knnper.data.examples import Examples
from knnper.models.base import EmbeddingModel
from strategies.core.task import Task

GradientHook = Callable[[Tensor, Tensor], None]
"""``(gradient, parameters) -> None``; see `strategies.core.local_sgd.local_sgd`."""

Objective = Callable[[EmbeddingModel, Tensor, Tensor], Tensor]
"""``(module, inputs, labels) -> losses``: of each example, shape (n,), or their mean.

Inputs are normalised, labels int64 of shape (n,).
"""


def cross_entropy(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the model's own loss of each example, shape (n,): -log h(x)[y] mostly."""
    return module.losses(inputs, labels)


def head_cross_entropy(
    module: EmbeddingModel, embeddings: Tensor, labels: Tensor
) -> Tensor:
    """Return -log of the head's part for y of each embedding (n, p), shape (n,)."""
    logits = module.head(embeddings).float()
    return functional.cross_entropy(logits, labels, reduction="none")


@dataclass(frozen=True)
class Batch:
    """A mini-batch on the model's device.

    Attributes
    ----------
    examples
        The examples, augmented.
    weights
        Factor on the loss of each, shape (n,); None is 1.
    """

    examples: Examples
    weights: Tensor | None


class LocalModel:
    """What a local step works with; made by `strategies.core.local_sgd.local_sgd`.

    Attributes
    ----------
    task
        Its ``model`` holds the current parameters and the last gradient.
    learning_rate
        η.
    visited
        Which examples a mini-batch has held so far, bool of shape (n,), on the CPU.
    """

    def __init__(  # noqa: PLR0913 (as `local_sgd`)
        self,
        task: Task,
        examples: Examples,
        positions: Iterator[Tensor],
        other_positions: Iterator[Tensor],
        generator: np.random.Generator,
        learning_rate: float,
        *,
        gradient_hook: GradientHook | None,
        example_weights: Tensor | None,
        trainable: Tensor | None,
        objective: Objective,
    ) -> None:
        device = task.model.device
        self.task = task
        self.learning_rate = learning_rate
        self.visited = torch.zeros(len(examples), dtype=torch.bool)
        self._examples = Examples(
            examples.images.to(device), examples.labels.to(device)
        )
        self._weights = None if example_weights is None else example_weights.to(device)
        self._positions = positions
        self._other_positions = other_positions
        self._generator = generator
        self._augment = AUGMENTATIONS[task.training.augmentation]
        self._gradient_hook = gradient_hook
        self._objective = objective
        # A tensor of which nothing is trained has no gradient: only these move it.
        moves = gradient_hook is not None or task.training.weight_decay > 0
        self._fixed = _fixed_parameters(task, trainable) if moves else None
        self._optimizer = sgd(task, task.model.parameters, learning_rate)

    @property
    def parameters(self) -> Tensor:
        """The current parameters, shape (num_parameters,): the model's own memory."""
        return self.task.model.parameters.detach()

    @property
    def gradient(self) -> Tensor:
        """What the last `backward` left, shape (num_parameters,), on the device."""
        return self.task.model.gradient

    def next_batch(self) -> Batch:
        """Return the next mini-batch; every epoch is a new permutation."""
        return self._batch(next(self._positions))

    def independent_batch(self) -> Batch:
        """Return the next mini-batch of a second order, which leaves the first alone.

        A step that needs several mini-batches so sees what SGD sees, and more.
        """
        return self._batch(next(self._other_positions))

    def _batch(self, positions: Tensor) -> Batch:
        self.visited[positions] = True
        chosen = positions.to(self.task.model.device)
        batch = self._examples.take(chosen)
        images = self._augment(batch.images, self._generator)
        weights = None if self._weights is None else self._weights[chosen]
        return Batch(Examples(images, batch.labels), weights)

    def backward(self, batch: Batch, at: Tensor | None = None) -> Tensor:
        """Fill `gradient` with that of the mean loss; return the loss, a scalar.

        The gradient hook is called, with the parameters that the gradient is of.

        Parameters
        ----------
        batch
            Where.
        at
            Other parameters to take the gradient at, shape (num_parameters,). The
            model's own are there again afterwards; buffers see one pass more.
        """
        if at is None:
            return self._backward(batch)
        own = self.parameters.clone()
        try:
            self.parameters.copy_(at)
            return self._backward(batch)
        finally:
            self.parameters.copy_(own)

    @contextlib.contextmanager
    def aside(self, buffers: Tensor) -> Iterator[None]:
        """Let passes inside a ``with`` block leave no trace but `gradient`.

        The model's buffers and the random numbers that its layers draw are the same
        afterwards, so that a pass `at` other parameters does not show in the model.

        Parameters
        ----------
        buffers
            What the passes take for the model's buffers, and update in place: shape
            (num_weights - num_parameters,), on the model's device.
        """
        model = self.task.model
        own = model.buffers.clone()
        device = model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                model.buffers.copy_(buffers)
                yield
                buffers.copy_(model.buffers)
            finally:
                model.buffers.copy_(own)

    def step(self) -> None:
        """Let the optimizer step along `gradient`."""
        if self._fixed is None:
            self._optimizer.step()
            return
        where, values = self._fixed
        self._optimizer.step()
        self.parameters[where] = values

    def _backward(self, batch: Batch) -> Tensor:
        model, examples = self.task.model, batch.examples
        with self.task.autocast():
            inputs = self.task.normalize(examples.images)
            losses = self._objective(model.module, inputs, examples.labels)
        loss = (losses if batch.weights is None else losses * batch.weights).mean()
        model.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        if self._gradient_hook is not None:
            self._gradient_hook(model.gradient, self.parameters)
        return loss.detach()


def sgd(task: Task, parameters: nn.Parameter, learning_rate: float) -> torch.optim.SGD:
    """Return the optimizer of local training, as the training section says.

    Parameters
    ----------
    task
        Gives momentum and weight decay.
    parameters
        What is trained, shape (num_parameters,).
    learning_rate
        η.
    """
    return torch.optim.SGD(
        [parameters],
        lr=learning_rate,
        momentum=task.training.momentum,
        weight_decay=task.training.weight_decay,
        fused=True,
    )


def _fixed_parameters(
    task: Task, trainable: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Return where the parameters are that must stay, and what they are."""
    if trainable is None:
        return None
    where = ~trainable[: task.model.num_parameters].to(task.model.device)
    return where, task.model.parameters.detach()[where].clone()
