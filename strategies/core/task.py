"""What a method is given to learn: a model, its input and how to train locally."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from knnper.config.sections import TrainingSettings
from knnper.config.seeding import RandomKey
from knnper.data.examples import Examples, InputSpec
from knnper.models.base import EmbeddingModel
from knnper.models.flat import FlatModel
from strategies.core.embedding_pool import EmbeddingPool


def _take_no_note(num_steps: int, num_examples: float) -> None:
    """Leave local training unobserved."""


@dataclass(frozen=True)
class Task:
    """The learning task that all methods share.

    Attributes
    ----------
    model
        The one model object of this process. Its weights are scratch: whoever uses it
        loads what it needs first.
    initial_weights
        w_0, shape (num_weights,): the same on every machine with the same seed.
    fresh_weights
        ``rng -> weights``: draws initial weights anew, shape (num_weights,), for
        methods that train more than one model.
    normalize
        From uint8 images (n, height, width, channels) on the model's device to its
        input.
    spec
        Shape of the input and number of classes.
    training
        The experiment's training section.
    evaluation_batch_size
        Images in one forward pass where nothing is trained.
    pool
        Where embeddings that clients have in common are looked for first.
    proxy
        Returns the examples that the server has of its own; None where it has none.
        Clients must not ask: at theirs there may be none.
    on_trained
        ``(num_steps, num_examples) -> None``, called after every local training with
        what really happened: the steps that were made, and the different examples
        behind them, as many equal ones where they weigh differently.
    """

    model: FlatModel
    initial_weights: Tensor
    fresh_weights: Callable[[RandomKey], Tensor]
    normalize: Callable[[Tensor], Tensor]
    spec: InputSpec
    training: TrainingSettings
    evaluation_batch_size: int = 256
    pool: EmbeddingPool = field(default_factory=EmbeddingPool)
    proxy: Callable[[], Examples] | None = None
    on_trained: Callable[[int, float], None] = _take_no_note

    @property
    def head_mask(self) -> Tensor:
        """Which weights belong to the head, bool of shape (num_weights,)."""
        members = set(self.model.module.classifier.modules())
        return self.model.mask(lambda module: module in members)

    def embed(self, weights: Tensor, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p).

        Parameters
        ----------
        weights
            w, shape (num_weights,).
        images
            uint8, shape (n, height, width, channels).
        """
        return self.pool.embed(weights, images, self._embed)

    def head(self, weights: Tensor, embeddings: Tensor) -> Tensor:
        """Return the model's probabilities (n, c) from its embeddings (n, p)."""
        return torch.softmax(self._head(weights, embeddings), dim=1)

    def logits(self, weights: Tensor, images: Tensor) -> Tensor:
        """Return the logits of h_w(x), float32 of shape (n, c).

        The head on top of `embed`, so that the two agree in every bit.
        """
        return self._head(weights, self.embed(weights, images))

    def probabilities(self, weights: Tensor, images: Tensor) -> Tensor:
        """Return h_w(x), float32 of shape (n, c), rows summing to 1."""
        return torch.softmax(self.logits(weights, images), dim=1)

    def losses(self, weights: Tensor, examples: Examples) -> Tensor:
        """Return what training minimises the mean of, float32 of shape (n,).

        These are `EmbeddingModel.losses` in evaluation mode.

        Parameters
        ----------
        weights
            w, shape (num_weights,).
        examples
            n of them.
        """
        if not self.model.module.learns_from_embeddings:
            return self._models_own_losses(weights, examples)
        logits = self.logits(weights, examples.images)
        return functional.cross_entropy(logits, examples.labels, reduction="none")

    def loss_sum(self, weights: Tensor, examples: Examples) -> Tensor:
        """Return the sum of `losses`, shape (); 0 without examples."""
        if not self.model.module.learns_from_embeddings:
            return self._models_own_losses(weights, examples).sum()
        logits = self.logits(weights, examples.images)
        return functional.cross_entropy(logits, examples.labels, reduction="sum")

    def autocast(self) -> torch.autocast:
        """Return the context in which the model runs in the precision that is set."""
        return torch.autocast(
            self.model.device.type,
            dtype=torch.bfloat16,
            enabled=self.training.precision == "bfloat16",
        )

    def _embed(self, weights: Tensor, images: Tensor) -> Tensor:
        module = self._evaluating(weights)
        return self._in_batches(
            images,
            lambda part: module.embed(self.normalize(part)),
            module.embedding_dim,
        )

    def _head(self, weights: Tensor, embeddings: Tensor) -> Tensor:
        module = self._evaluating(weights)
        return self._in_batches(embeddings, module.head, self.spec.num_classes)

    def _models_own_losses(self, weights: Tensor, examples: Examples) -> Tensor:
        if len(examples) == 0:
            return torch.empty(0)
        module, device = self._evaluating(weights), self.model.device
        size = self.evaluation_batch_size
        images_of = torch.split(examples.images, size)
        batches = zip(images_of, torch.split(examples.labels, size), strict=True)
        with torch.inference_mode(), self.autocast():
            losses = [
                module.losses(self.normalize(images.to(device)), labels.to(device))
                for images, labels in batches
            ]
        # A copy made out here is an ordinary tensor, which may be trained with.
        return torch.cat(losses).float().cpu()

    def _evaluating(self, weights: Tensor) -> EmbeddingModel:
        self.model.show(weights)
        module = self.model.module
        return module.eval() if module.training else module

    def _in_batches(
        self, inputs: Tensor, function: Callable[[Tensor], Tensor], width: int
    ) -> Tensor:
        if len(inputs) == 0:
            return torch.empty((0, width))
        num_batches = math.ceil(len(inputs) / self.evaluation_batch_size)
        # Of nearly equal sizes: a small last batch takes longer than it should.
        parts = inputs.tensor_split(num_batches) if num_batches > 1 else (inputs,)
        with torch.inference_mode(), self.autocast():
            outputs = [function(part.to(self.model.device)) for part in parts]
        # A copy made out here is an ordinary tensor, which may be trained with.
        return torch.cat(outputs).float().cpu()
