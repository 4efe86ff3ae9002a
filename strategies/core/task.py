"""What a method is given to learn: a model, its input and how to train locally."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from knnper.data.examples import Examples, InputSpec
from knnper.experiment import TrainingSettings
from knnper.models import EmbeddingModel, FlatModel
from knnper.seeding import RandomKey

Embed = Callable[[Tensor, Tensor], Tensor]
"""``(weights (num_weights,), images (n, height, width, channels)) -> (n, p)``."""

MOST_BYTES = 512 * 2**20
"""Room for 100,000 embeddings of 1280 numbers."""


class KeptEmbeddings:
    """What one model object has computed, by the content of weights and images.

    Runs that differ in λ, k, σ or the capacity alone embed the same images with the
    same weights. Whoever asks must agree in all else: architecture, normalisation,
    precision, batches, threads and device. What no longer fits is computed each time:
    runs ask for everything in turn, so that whatever made room would be gone before it
    is asked for.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    def embed(
        self, weights: Tensor, images: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return ``compute()``, or what it returned for equal weights and images.

        Both are on the CPU; nobody changes the embeddings (n, p) afterwards.
        """
        if self._last is None or not torch.equal(self._last[0], weights):
            # A copy: training may go on in the same memory.
            self._last = weights.clone(), _digest(weights)
        key = self._last[1], _digest(images)
        if key not in self._kept:
            embeddings = compute()
            if embeddings.nbytes > self._left:
                return embeddings
            self._left -= embeddings.nbytes
            self._kept[key] = embeddings
        return self._kept[key]


class EmbeddingPool:
    """Images that each model embeds once, however many ask.

    Several who serve a client ask for the same embeddings: to predict, to store, to
    compare with the global model. Images are recognised as the very objects that are
    held, models by their memory, so a copy is simply computed.
    """

    def __init__(self, kept: KeptEmbeddings | None = None) -> None:
        self._kept = kept
        self._models: list[tuple[Tensor, int]] = []
        self._held: dict[int, Tensor] = {}
        self._embedded: dict[tuple[int, int], Tensor] = {}

    @contextlib.contextmanager
    def holding(
        self, models: Sequence[Tensor], images: Iterable[Tensor]
    ) -> Iterator[None]:
        """Hold images and models inside a ``with`` block.

        ``models``: Weights, each of shape (num_weights,); equal ones are one model.
        ``images``: Those of one split of one client each. Raises RuntimeError if
        something is held already.
        """
        if self._held:
            raise RuntimeError("the pool already holds images; one group at a time")
        try:
            for weights in models:
                equal = (n for held, n in self._models if torch.equal(held, weights))
                self._models.append((weights, next(equal, len(self._models))))
            self._held = {id(split): split for split in images}
            yield
        finally:
            self._models, self._held, self._embedded = [], {}, {}

    def embed(self, weights: Tensor, images: Tensor, embed: Embed) -> Tensor:
        """Return ``embed(weights, images)``, computed once where both are held."""
        place = weights.data_ptr(), weights.shape
        same = (n for held, n in self._models if (held.data_ptr(), held.shape) == place)
        model = next(same, None)
        if model is None or id(images) not in self._held:
            return embed(weights, images)
        key = model, id(images)
        if key not in self._embedded:
            self._embedded[key] = (
                embed(weights, images)
                if self._kept is None
                else self._kept.embed(weights, images, lambda: embed(weights, images))
            )
        return self._embedded[key]


def _digest(tensor: Tensor) -> str:
    content = np.ascontiguousarray(tensor.detach().numpy())
    digest = hashlib.sha256(f"{content.dtype} {content.shape}\n".encode())
    digest.update(content.data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Task:
    """The learning task that all methods share."""

    # The one model object of this process. Its weights are scratch: whoever uses it
    # loads what it needs first.
    model: FlatModel
    # w_0, shape (num_weights,): the same on every machine with the same seed.
    initial_weights: Tensor
    # ``rng -> weights``: draws initial weights anew, shape (num_weights,), for methods
    # that train more than one model.
    fresh_weights: Callable[[RandomKey], Tensor]
    # From uint8 images (n, height, width, channels) on the model's device to its input.
    normalize: Callable[[Tensor], Tensor]
    spec: InputSpec  # Shape of the input and number of classes
    training: TrainingSettings  # The experiment's training section
    # Images in one forward pass where nothing is trained.
    evaluation_batch_size: int = 256
    # Where embeddings that clients have in common are looked for first.
    pool: EmbeddingPool = field(default_factory=EmbeddingPool)
    # Returns the examples that the server has of its own; None where it has none.
    # Clients must not ask: at theirs there may be none.
    proxy: Callable[[], Examples] | None = None
    # ``(num_steps, num_examples) -> None``, called after every local training with what
    # really happened: the steps that were made, and the different examples behind them,
    # as many equal ones where they weigh differently.
    on_trained: Callable[[int, float], None] = lambda num_steps, num_examples: None

    @property
    def first_rate(self) -> float:
        """The learning rate of a client that begins when the rounds are over.

        That of the last round may be a hundredth of it, which is for weights that are
        trained already and would hardly move others.
        """
        return self.training.learning_rate_at(1)

    @property
    def last_rate(self) -> float:
        """The learning rate of the last round, for weights that are trained already."""
        return self.training.learning_rate_at(self.training.num_rounds)

    @property
    def head_mask(self) -> Tensor:
        """Which weights belong to the head, bool of shape (num_weights,)."""
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

        The head on top of `embed`, so that the two agree in every bit.
        """
        return self._head(weights, self.embed(weights, images))

    def probabilities(self, weights: Tensor, images: Tensor) -> Tensor:
        """Return h_w(x), float32 of shape (n, c), rows summing to 1."""
        return torch.softmax(self.logits(weights, images), dim=1)

    def losses(self, weights: Tensor, examples: Examples) -> Tensor:
        """Return what training minimises the mean of, float32 of shape (n,).

        These are `EmbeddingModel.losses` in evaluation mode.
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
