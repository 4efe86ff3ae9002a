"""What a method is given to learn, what clients serve of it, and the one evaluation."""

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

from knnper.data.examples import Examples, InputSpec
from knnper.data.normalization import require_tensor
from knnper.embedding_model import Criterion, EmbeddingModel, FlatModel
from knnper.experiment import TrainingSettings
from knnper.metrics import Compute
from knnper.seeding import RandomKey

NUM_CALIBRATION_BINS = 15

Embed = Callable[[Tensor, Tensor], Tensor]
"""``(weights (num_weights,), images (n, height, width, channels)) -> (n, p)``."""

MOST_BYTES = 512 * 2**20
"""Room for 100,000 embeddings of 1280 numbers."""


class KeptEmbeddings:
    """What one model object has computed, by the content of weights and images.

    Whoever asks must agree in all else: architecture, normalisation, precision,
    batches, threads and device. What no longer fits is computed each time: runs ask for
    everything in turn, so what made room would be gone before it is asked for.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    def embed(
        self, weights: Tensor, images: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return ``compute()``, or what it returned for equal ones; not to change."""
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
        self, models: Sequence[Tensor], images: Iterable[Tensor], *, keep: bool = True
    ) -> Iterator[None]:
        """Hold models, of which equal ones are one, and splits of images.

        ``keep``: Whether others may ask for the same later, so that it is worth room.
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
    frozen: str = ""  # SHA-256 of the model's weights that are not trained
    # The root of the run's random choices, for what a client is in all rounds.
    key: RandomKey = field(default=RandomKey(0))
    # ``ratio -> model``: a new one, with the first ⌈ratio c⌉ of each hidden layer's c
    # channels, its weights scratch; None where the network cannot be made narrower.
    narrower: Callable[[float], FlatModel] | None = None
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
        return self.model.module.criterion(logits, examples.labels)

    def loss_sum(self, weights: Tensor, examples: Examples) -> Tensor:
        """Return the sum of `losses`, shape (); 0 without examples."""
        module = self.model.module
        if not module.learns_from_embeddings or type(module.criterion) is not Criterion:
            return self.losses(weights, examples).sum()
        logits = self.logits(weights, examples.images)
        return functional.cross_entropy(logits, examples.labels, reduction="sum")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the model runs in the precision that is set."""
        if self.training.precision != "bfloat16":
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16)

    def in_batches(
        self, inputs: Tensor, function: Callable[[Tensor], Tensor], width: int
    ) -> Tensor:
        """Return the rows (n, width) of a function that trains nothing."""
        require_tensor(inputs)
        if len(inputs) == 0:
            return torch.empty((0, width))
        num_batches = math.ceil(len(inputs) / self.evaluation_batch_size)
        # Of nearly equal sizes: a small last batch takes longer than it should.
        parts = inputs.tensor_split(num_batches) if num_batches > 1 else (inputs,)
        with torch.inference_mode(), self.autocast():
            outputs = [function(part.to(self.model.device)) for part in parts]
        # A copy made out here is an ordinary tensor, which may be trained with.
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
        # A copy made out here is an ordinary tensor, which may be trained with.
        return torch.cat(losses).float().cpu()

    def _evaluating(self, weights: Tensor) -> EmbeddingModel:
        self.model.show(weights)
        module = self.model.module
        return module.eval() if module.training else module


class Predictor(Protocol):
    """What a client serves once it is personalised."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities, float32 of shape (n, num_classes); rows sum to 1.

        ``images``: uint8, shape (n, height, width, channels).
        """

    def describe(self) -> Mapping[str, float]:
        """Return what was chosen for this client, as in ``{"knn_weight": 0.7}``."""


@runtime_checkable
class EmbeddingPredictor(Predictor, Protocol):
    """A predictor with a representation, on which a local memory can be put."""

    def embed(self, images: Tensor) -> Tensor:
        """Return φ(x), float32 of shape (n, p), of uint8 images."""

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""

    def without_validation(self) -> "EmbeddingPredictor":
        """Return what this would be without training on the validation split."""


@dataclass(frozen=True)
class Evaluation:
    """How a predictor did on some labelled examples: sums that can be pooled."""

    num_examples: int
    num_correct: int
    log_loss_sum: float  # Σ -log p(y|x), natural logarithm, p clipped at 1e-12
    # bin_counts, bin_confidence, bin_correct: Per bin of confidence (15 equal widths
    # over [0, 1]): examples, sum of the largest probability, correct examples. Guo et
    # al., "On Calibration of Modern Neural Networks", 2017, Eq. 3.
    bin_counts: tuple[int, ...]
    bin_confidence: tuple[float, ...]
    bin_correct: tuple[int, ...]
    # weight_sum, weight_correct: Σ_i P(y_i) over all examples and over those that are
    # right, where labels count P(y); both None where all examples count the same.
    weight_sum: float | None = None
    weight_correct: float | None = None
    # What `run.metrics` asks for beyond these sums, by name; None is not defined here.
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The fraction that is right; None without examples.

        Where labels count P(y) it is Σ_i P(y_i) 1[right] / Σ_i P(y_i), the personalised
        accuracy of Chen et al. 2023, section 5, step 5. It is None where the
        examples have no label that counts.
        """
        if self.weight_sum is not None and self.weight_correct is not None:
            return self.weight_correct / self.weight_sum if self.weight_sum else None
        return self.num_correct / self.num_examples if self.num_examples else None


@dataclass(frozen=True)
class ClientResult:
    """What is known of a client in the end. Counts and metrics only."""

    client: str  # The client's name
    seen: bool  # Whether it could take part in training
    num_train: int  # Examples it learns from
    num_validation: int
    # personal, reference: On the test split: its personalised model, and the
    # unpersonalised (global) one.
    personal: Evaluation
    reference: Evaluation
    validation: Evaluation  # The unpersonalised model on the validation split
    # What the method chose for this client, as in ``{"knn_weight": 0.7}``.
    chosen: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """How clients do on their validation splits between two rounds."""

    reference: Evaluation  # the unpersonalised model
    # Of the personalised models: examples that they are asked for, and right about. No
    # more of them than these counts leaves a site.
    num_personal: int = 0
    num_personal_correct: int = 0
    # Why, by name, of the clients that could not be personalised.
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientResults:
    """What several clients that were served together report."""

    # One a client, in the order in which they were asked, but for the failures.
    results: tuple[ClientResult, ...]
    # Why, by name, of the clients that could not be served.
    failures: Mapping[str, str] = field(default_factory=dict)
    # Clients that are served and keep the figures to themselves.
    withheld: tuple[str, ...] = ()


def evaluate(predictor: Predictor, examples: Examples) -> Evaluation:
    """Return how ``predictor`` does."""
    return score(predict(predictor, examples), examples.labels)


def predict(predictor: Predictor, examples: Examples) -> Tensor:
    """Return the probabilities of examples, float32 of shape (n, c)."""
    # Without examples nothing is asked: not every predictor knows what to say to that.
    return predictor(examples.images) if len(examples) else torch.empty((0, 0))


def score(
    probabilities: Tensor,
    labels: Tensor,
    class_weights: Tensor | None = None,
    metrics: Mapping[str, Compute] = MappingProxyType({}),
) -> Evaluation:
    """Return how probabilities (n, c) fit int64 labels (n,) that count P(y), (c,).

    ``metrics``: What to compute beside the sums, by name; there all examples count
    alike.
    """
    if len(labels) == 0:
        empty = (0,) * NUM_CALIBRATION_BINS
        return Evaluation(0, 0, 0.0, empty, (0.0,) * NUM_CALIBRATION_BINS, empty)
    # What is not finite predicts nothing: it counts as wrong, with no confidence.
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
    """Return Σ_i P(y_i), the same whatever the order of the labels."""
    if class_weights is None:
        return None
    counts = _counts(labels, len(class_weights))
    return math.fsum((counts * class_weights).tolist())


class Trained:
    """A head on representations, and what it tells of its training; a dataclass."""

    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    # What was chosen for this client, as in ``{"prox_weight": 0.1}``.
    chosen: Mapping[str, float]
    # Makes the predictor that was trained without the validation split; None where this
    # one was.
    trained_alone: Callable[[], Self] | None

    def __call__(self, images: Tensor) -> Tensor:
        """Return probabilities (n, c) of images (n, height, width, channels)."""
        return self.head(self.embed(images))

    def without_validation(self) -> Self:
        """Return the predictor before it was trained on the validation split."""
        return self if self.trained_alone is None else self.trained_alone()

    def describe(self) -> Mapping[str, float]:
        """Return what was chosen."""
        return self.chosen


@dataclass(frozen=True)
class MixturePredictor(Trained):
    """Serves Σ_m π_m h_m."""

    task: Task = field(repr=False)  # Gives the architecture
    components: Sequence[Tensor] = field(repr=False)  # M of shape (num_weights,)
    mixture_weights: Tensor  # π, shape (M,), summing to 1
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], MixturePredictor] | None" = None

    def embed(self, images: Tensor) -> Tensor:
        """Return the components' representations side by side, shape (n, M p)."""
        parts = [self.task.embed(weights, images) for weights in self.components]
        return torch.cat(parts, dim=1)

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
class ModelPredictor(Trained):
    """Serves h_w."""

    task: Task = field(repr=False)  # Gives the architecture
    weights: Tensor = field(repr=False)  # w, shape (num_weights,)
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], ModelPredictor] | None" = None

    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p)."""
        return self.task.embed(self.weights, images)

    def head(self, embeddings: Tensor) -> Tensor:
        """Return the probabilities (n, c) of representations (n, p)."""
        return self.task.head(self.weights, embeddings)


@dataclass(frozen=True)
class HeadPredictor(Trained):
    """Serves another head than the model's on φ_w."""

    task: Task = field(repr=False)  # Gives the architecture
    weights: Tensor = field(repr=False)  # w, shape (num_weights,)
    # From φ_w(x), (n, p), to probabilities (n, c).
    head: Callable[[Tensor], Tensor] = field(repr=False)
    chosen: Mapping[str, float] = field(default_factory=dict)
    trained_alone: "Callable[[], HeadPredictor] | None" = None

    def embed(self, images: Tensor) -> Tensor:
        """Return φ_w(x), float32 of shape (n, p)."""
        return self.task.embed(self.weights, images)
