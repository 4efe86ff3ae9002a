"""The learning task of a method, the predictors that clients serve, and the evaluation.

All methods, engines and reports use `evaluate` and `score`.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from knnper.data.examples import Examples, InputSpec
from knnper.data.normalization import require_tensor
from knnper.embedding_model import Criterion, EmbeddingModel
from knnper.experiment import TrainingSettings
from knnper.flat_model import FlatModel
from knnper.metrics import Compute
from knnper.seeding import RandomKey

NUM_CALIBRATION_BINS = 15

Embed = Callable[[Tensor, Tensor], Tensor]
"""``(weights (num_weights,), images (n, height, width, channels)) -> (n, p)``."""

MOST_BYTES = 512 * 2**20
"""Room for 100,000 embeddings of 1280 numbers."""


class KeptEmbeddings:
    """Cache of embeddings by the content of weights and images, for several runs.

    All runs must agree in architecture, normalisation, precision, batches, threads and
    device. Embeddings that do not fit are computed each time. Nothing is evicted: runs
    ask for all embeddings in turn, so each would be evicted before its next use.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    def embed(
        self, weights: Tensor, images: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return ``compute()``, cached by content; callers must not modify it."""
        if self._last is None or not torch.equal(self._last[0], weights):
            # A copy, since training may continue in the same memory.
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
    """Cache of embeddings while a group of clients is personalised.

    The same embeddings are needed to predict, to store and to compare with the global
    model. Images are recognised by object identity and models by their memory; a copy
    is embedded again.
    """

    def __init__(self, kept: KeptEmbeddings | None = None) -> None:
        self._kept = kept
        self._models: list[tuple[Tensor, int]] = []
        self._held: dict[int, Tensor] = {}
        self._embedded: dict[tuple[int, int], Tensor] = {}

    @contextlib.contextmanager
    def holding(
        self, models: Sequence[Tensor], images: Iterable[Tensor], *, keep: bool = True
    ) -> Iterator[None]:
        """Cache embeddings by these models and splits of images in a ``with`` block.

        Equal models share their embeddings. ``keep``: whether to keep the embeddings in
        `KeptEmbeddings`, since other runs may need them.
        """
        if self._held:
            raise RuntimeError("the pool already holds images; one group at a time")
        kept = self._kept
        try:
            self._kept = kept if keep else None
            for weights in models:
                equal = (n for held, n in self._models if torch.equal(held, weights))
                self._models.append((weights, next(equal, len(self._models))))
            self._held = {id(split): split for split in images}
            yield
        finally:
            self._models, self._held, self._embedded = [], {}, {}
            self._kept = kept

    def embed(self, weights: Tensor, images: Tensor, embed: Embed) -> Tensor:
        """Return ``embed(weights, images)``, computed once if both are held."""
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


class Predictor(Protocol):
    """A personalised client's predictions."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, num_classes); rows sum to 1.

        ``images``: uint8, shape (n, height, width, channels).
        """

    def describe(self) -> Mapping[str, float]:
        """Return the choices made for this client, as in ``{"knn_weight": 0.7}``."""


@runtime_checkable
class EmbeddingPredictor(Predictor, Protocol):
    """A predictor with a representation, on which a local memory can be put."""

    def embed(self, images: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p), of uint8 images."""

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""

    def without_validation(self) -> "EmbeddingPredictor":
        """Return the predictor as it would be without training on validation data."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a predictor on labelled examples, as sums that can be pooled."""

    num_examples: int
    num_correct: int
    log_loss_sum: float  # Σ -log p(y|x), natural logarithm, p clipped at 1e-12
    # Calibration (Guo et al., "On Calibration of Modern Neural Networks", 2017, Eq. 3):
    # examples, sum of the largest probabilities and correct examples in each of 15
    # equal bins of confidence over [0, 1].
    bin_counts: tuple[int, ...]
    bin_confidence: tuple[float, ...]
    bin_correct: tuple[int, ...]
    # Σ_i P(y_i) over all examples and over the correct ones, if labels have weights
    # P(y); both None if all examples count the same.
    weight_sum: float | None = None
    weight_correct: float | None = None
    # The metrics of `run.metrics` by name; None is undefined on these examples.
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct examples; None without examples.

        With label weights P(y) it is Σ_i P(y_i) 1[correct] / Σ_i P(y_i), the
        personalised accuracy of Chen et al. 2023, section 5, step 5, and None if all
        labels have weight 0.
        """
        if self.weight_sum is not None and self.weight_correct is not None:
            return self.weight_correct / self.weight_sum if self.weight_sum else None
        return self.num_correct / self.num_examples if self.num_examples else None


@dataclass(frozen=True)
class ClientResult:
    """The results of one client: counts and metrics only, no data."""

    client: str  # the client's name
    seen: bool  # whether it could take part in training
    num_train: int  # training examples
    num_validation: int
    personal: Evaluation  # the personalised model on the test split
    reference: Evaluation  # the unpersonalised (global) model on the test split
    validation: Evaluation  # the unpersonalised model on the validation split
    # The choices made for this client, as in ``{"knn_weight": 0.7}``.
    chosen: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """Metrics of clients on their validation splits between two rounds."""

    reference: Evaluation  # the unpersonalised model
    # Examples and correct examples of the personalised models. A site sends no more
    # than these counts.
    num_personal: int = 0
    num_personal_correct: int = 0
    # The reason by name of each client that could not be personalised.
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResults:
    """Results of several clients that were personalised in one task."""

    results: tuple[ClientResult, ...]  # in the order of the request, without failures
    # The reason by name of each client that could not be personalised.
    failures: Mapping[str, str] = field(default_factory=dict)
    # Clients that are served but share no metrics.
    withheld: tuple[str, ...] = ()


def evaluate(predictor: Predictor, examples: Examples) -> Evaluation:
    """Evaluate a predictor on labelled examples."""
    return score(predict(predictor, examples), examples.labels)


def predict(predictor: Predictor, examples: Examples) -> Tensor:
    """Predict the probabilities of examples, float32 of shape (n, c)."""
    # Not every predictor accepts an empty batch.
    return predictor(examples.images) if len(examples) else torch.empty((0, 0))


def score(
    probabilities: Tensor,
    labels: Tensor,
    class_weights: Tensor | None = None,
    metrics: Mapping[str, Compute] = MappingProxyType({}),
) -> Evaluation:
    """Evaluate probabilities (n, c) against int64 labels (n,).

    ``class_weights``: P(y), shape (c,), or None for equal weights. ``metrics``: further
    metrics to compute, by name, with equal weights.
    """
    if len(labels) == 0:
        empty = (0,) * NUM_CALIBRATION_BINS
        return Evaluation(0, 0, 0.0, empty, (0.0,) * NUM_CALIBRATION_BINS, empty)
    # A row that is not finite counts as wrong, with confidence 0.
    probabilities = probabilities.double()
    defined = torch.isfinite(probabilities).all(dim=1)
    probabilities = probabilities.where(defined[:, None], 0.0)
    confidence, predicted = probabilities.max(dim=1)
    correct = (predicted == labels) & defined
    of_label = probabilities.gather(1, labels[:, None]).squeeze(1)
    confidences = torch.zeros(NUM_CALIBRATION_BINS, dtype=torch.float64)
    bins = (confidence * NUM_CALIBRATION_BINS).long().clamp(0, NUM_CALIBRATION_BINS - 1)
    return Evaluation(
        num_examples=len(labels),
        num_correct=int(correct.sum()),
        log_loss_sum=float(-of_label.clamp_min(1e-12).log().sum()),
        bin_counts=tuple(_counts(bins, NUM_CALIBRATION_BINS).tolist()),
        bin_confidence=tuple(confidences.index_add_(0, bins, confidence).tolist()),
        bin_correct=tuple(_counts(bins[correct], NUM_CALIBRATION_BINS).tolist()),
        weight_sum=_weight_of(labels, class_weights),
        weight_correct=_weight_of(labels[correct], class_weights),
        metrics={
            name: compute(labels.numpy(), probabilities.numpy())
            for name, compute in metrics.items()
        },
    )


def _counts(values: Tensor, num_kinds: int) -> Tensor:
    return torch.bincount(values, minlength=num_kinds)


def _weight_of(labels: Tensor, class_weights: Tensor | None) -> float | None:
    """Return Σ_i P(y_i), independent of the order of the labels."""
    if class_weights is None:
        return None
    counts = _counts(labels, len(class_weights))
    return math.fsum((counts * class_weights).tolist())


class RepresentationPredictor:
    """Base of predictors that are dataclasses with a representation and a head."""

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    # The choices made for this client, as in ``{"prox_weight": 0.1}``.
    chosen: Mapping[str, float]
    # Makes the predictor trained without the validation split; None if this one was not
    # trained on that split.
    trained_alone: Callable[[], Self] | None

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities (n, c) of images (n, height, width, channels)."""
        return self.head(self.embed(images))

    def without_validation(self) -> Self:
        """Return the predictor that was not trained on the validation split."""
        return self if self.trained_alone is None else self.trained_alone()

    def describe(self) -> Mapping[str, float]:
        """Return the choices made for this client."""
        return self.chosen


@dataclass(frozen=True)
class MixturePredictor(RepresentationPredictor):
    """Serves Σ_m π_m h_m."""

    task: Task = field(repr=False)  # Gives the architecture
    components: Sequence[Tensor] = field(repr=False)  # M of shape (num_weights,)
    mixture_weights: Tensor  # π, shape (M,), summing to 1
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], MixturePredictor] | None" = None

    @override
    def embed(self, images: Tensor) -> Tensor:
        """Return the components' representations side by side, shape (n, M p)."""
        parts = [self.task.embed(weights, images) for weights in self.components]
        return torch.cat(parts, dim=1)

    @override
    def head(self, embeddings: Tensor) -> Tensor:
        """Return the mixture's probabilities (n, c) of representations (n, M p)."""
        parts = embeddings.tensor_split(len(self.components), dim=1)
        mixed = [
            share * self.task.head(weights, part)
            for share, weights, part in zip(
                self.mixture_weights, self.components, parts, strict=True
            )
        ]
        return torch.stack(mixed).sum(dim=0)


@dataclass(frozen=True)
class ModelPredictor(RepresentationPredictor):
    """Serves h_w."""

    task: Task = field(repr=False)  # Gives the architecture
    weights: Tensor = field(repr=False)  # w, shape (num_weights,)
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], ModelPredictor] | None" = None

    @override
    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p)."""
        return self.task.embed(self.weights, images)

    @override
    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""
        return self.task.head(self.weights, embeddings)


@dataclass(frozen=True)
class HeadPredictor(RepresentationPredictor):
    """Serves another head than the model's on φ_w."""

    task: Task = field(repr=False)  # Gives the architecture
    weights: Tensor = field(repr=False)  # w, shape (num_weights,)
    # From φ_w(x), (n, p), to probabilities (n, c).
    head: Callable[[Tensor], Tensor] = field(repr=False)
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], HeadPredictor] | None" = None

    @override
    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p)."""
        return self.task.embed(self.weights, images)
