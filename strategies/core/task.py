"""The learning task of a method: a model, its inputs and the training settings."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from knnper.data.examples import Examples, InputSpec
from knnper.data.normalization import require_tensor
from knnper.embedding_model import Criterion, EmbeddingModel
from knnper.experiment import TrainingSettings
from knnper.flat_model import FlatModel
from knnper.privacy import NoiseSource, seeded_noise
from knnper.seeding import RandomKey
from knnper.strategies.core.embedding_pool import EmbeddingPool


@dataclass(frozen=True)
class Task:
    """The learning task that all methods share."""

    # The only model object of this process. Its weights are scratch: load weights
    # before each use.
    model: FlatModel
    # w_0, shape (num_weights,): the same on every machine with the same seed.
    initial_weights: Tensor
    # ``rng -> weights``: draws other initial weights, shape (num_weights,), for methods
    # that train several models.
    fresh_weights: Callable[[RandomKey], Tensor]
    # From uint8 images (n, height, width, channels) on the model's device to its input.
    normalize: Callable[[Tensor], Tensor]
    spec: InputSpec  # shape of the input and number of classes
    training: TrainingSettings  # the experiment's training section
    evaluation_batch_size: int = 256  # images in one forward pass without training
    frozen: str = ""  # SHA-256 of the model's frozen weights
    # Makes the generators of noise at a client, for the sections on privacy.
    noise_source: NoiseSource = seeded_noise
    # The root of the run's random choices, for properties of a client in all rounds.
    key: RandomKey = field(default=RandomKey(0))
    # ``ratio -> model``: builds a model with the first ⌈ratio c⌉ of each hidden layer's
    # c channels, its weights scratch; None if the network cannot be made narrower.
    narrower: Callable[[float], FlatModel] | None = None
    # Cache of embeddings, shared by the steps of a personalisation.
    pool: EmbeddingPool = field(default_factory=EmbeddingPool)
    # Returns the server's own examples; None if it has none. For the server half only:
    # a client's process may not have them.
    proxy: Callable[[], Examples] | None = None
    # ``(num_steps, num_examples) -> None``, called after every local training with the
    # steps made and the effective number of examples used.
    on_trained: Callable[[int, float], None] = lambda num_steps, num_examples: None

    @property
    def first_rate(self) -> float:
        """The learning rate of the first round, for weights trained from the start.

        The rate of the last round may be a hundredth of it, too small for them.
        """
        return self.training.learning_rate_at(1)

    @property
    def last_rate(self) -> float:
        """The learning rate of the last round, for weights that are trained already."""
        return self.training.learning_rate_at(self.training.num_rounds)

    @property
    def head_mask(self) -> Tensor:
        """The weights of the head, bool of shape (num_weights,)."""
        members = set(self.model.module.classifier.modules())
        return self.model.mask(lambda module: module in members)

    def embed(self, weights: Tensor, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p), of uint8 images."""
        return self.pool.embed(weights, images, self._embed)

    def head(self, weights: Tensor, embeddings: Tensor) -> Tensor:
        """Return the model's probabilities (n, c) from its embeddings (n, p)."""
        return torch.softmax(self._head(weights, embeddings), dim=1)

    def logits(self, weights: Tensor, images: Tensor) -> Tensor:
        """Return the logits of h_w(x), float32 of shape (n, c).

        Computed by the head on top of `embed`, so that the two agree in every bit.
        """
        return self._head(weights, self.embed(weights, images))

    def probabilities(self, weights: Tensor, images: Tensor) -> Tensor:
        """Return h_w(x), float32 of shape (n, c), rows summing to 1."""
        return torch.softmax(self.logits(weights, images), dim=1)

    def losses(self, weights: Tensor, examples: Examples) -> Tensor:
        """Return the training loss of each example, float32 of shape (n,).

        These are `EmbeddingModel.losses` in evaluation mode.
        """
        if not self.model.module.learns_from_embeddings:
            return self._models_own_losses(weights, examples)
        logits = self.logits(weights, examples.images)
        return self.model.module.criterion(logits, examples.labels)

    def loss_sum(self, weights: Tensor, examples: Examples) -> Tensor:
        """Return the sum of `losses`, shape (); 0 without examples."""
        module = self.model.module
        if not module.learns_from_embeddings or type(module.criterion) is not Criterion:
            return self.losses(weights, examples).sum()
        logits = self.logits(weights, examples.images)
        return functional.cross_entropy(logits, examples.labels, reduction="sum")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context that sets the precision of the training section."""
        if self.training.precision != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16)

    def in_batches(
        self, inputs: Tensor, function: Callable[[Tensor], Tensor], width: int
    ) -> Tensor:
        """Apply a function without training to batches; return its rows (n, width)."""
        require_tensor(inputs)
        if len(inputs) == 0:
            return torch.empty((0, width))
        num_batches = math.ceil(len(inputs) / self.evaluation_batch_size)
        # Nearly equal sizes, since a small last batch uses the device badly.
        parts = inputs.tensor_split(num_batches) if num_batches > 1 else (inputs,)
        with torch.inference_mode(), self.autocast():
            outputs = [function(part.to(self.model.device)) for part in parts]
        # The copy is made outside of inference mode, so that it can be trained on.
        return torch.cat(outputs).float().cpu()

    def _embed(self, weights: Tensor, images: Tensor) -> Tensor:
        module = self._evaluating(weights)
        return self.in_batches(
            images,
            lambda part: module.embed(self.normalize(part)),
            module.embedding_dim,
        )

    def _head(self, weights: Tensor, embeddings: Tensor) -> Tensor:
        module = self._evaluating(weights)
        return self.in_batches(embeddings, module.head, self.spec.num_classes)

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
        # The copy is made outside of inference mode, so that it can be trained on.
        return torch.cat(losses).float().cpu()

    def _evaluating(self, weights: Tensor) -> EmbeddingModel:
        self.model.show(weights)
        module = self.model.module
        return module.eval() if module.training else module
