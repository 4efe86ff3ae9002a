"""What a method is given to learn: a model, its input and how to train locally."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from knnper.data.examples import Examples, InputSpec, no_examples
from knnper.errors import ConfigError, Problem, RunError
from knnper.experiment import TrainingSettings
from knnper.models import EmbeddingModel, FlatModel
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import denominator
from knnper.strategies.core.records import Record

Embed = Callable[[Tensor, Tensor], Tensor]
"""``(weights (num_weights,), images (n, height, width, channels)) -> (n, p)``."""

MOST_BYTES = 512 * 2**20
"""Room for 100,000 embeddings of 1280 numbers."""


class KeptEmbeddings:
    """What one model object has computed, by the content of weights and images.

    Runs that differ in λ, k, σ or the capacity alone embed the same images with the
    same weights.

    Whoever asks must agree in all else: architecture, normalisation, precision,
    batches, threads and device. What no longer fits is computed each time: runs ask for
    everything in turn, so that whatever made room would be gone before it is asked for.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    def embed(
        self, weights: Tensor, images: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """Return ``compute()``, or what it returned for equal weights and images.

        ``weights``: Shape (num_weights,), on the CPU. ``images``: Shape (n, height,
        width, channels), on the CPU. ``compute``: Returns their embeddings (n, p),
        which nobody changes afterwards.
        """
        key = self._model(weights), _digest(images)
        if key not in self._kept:
            embeddings = compute()
            if embeddings.nbytes > self._left:
                return embeddings
            self._left -= embeddings.nbytes
            self._kept[key] = embeddings
        return self._kept[key]

    def _model(self, weights: Tensor) -> str:
        """Return the digest of weights, which are mostly those of the last call."""
        if self._last is None or not torch.equal(self._last[0], weights):
            # A copy: training may go on in the same memory.
            self._last = weights.clone(), _digest(weights)
        return self._last[1]


class EmbeddingPool:
    """Images that each model embeds once, however many ask.

    Several who serve a client ask for the same embeddings: to predict, to store, to
    compare with the global model.

    Images are recognised as the very objects that are held, models by their memory, so
    a copy is simply computed.
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

        Parameters
        ----------
        models
            Weights, each of shape (num_weights,); equal ones are one model.
        images
            Those of one split of one client each, uint8 of shape (n, height, width,
            channels).

        Raises
        ------
        RuntimeError
            If something is held already.
        """
        if self._held:
            raise RuntimeError("the pool already holds images; one group at a time")
        try:
            for weights in models:
                self._models.append((weights, self._number_of_equal(weights)))
            self._held = {id(split): split for split in images}
            yield
        finally:
            self._models, self._held, self._embedded = [], {}, {}

    def embed(self, weights: Tensor, images: Tensor, embed: Embed) -> Tensor:
        """Return ``embed(weights, images)``, computed once where both are held."""
        model = self._model(weights)
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

    def _number_of_equal(self, weights: Tensor) -> int:
        for earlier, number in self._models:
            if torch.equal(earlier, weights):
                return number
        return len(self._models)

    def _model(self, weights: Tensor) -> int | None:
        for held, number in self._models:
            if held.data_ptr() == weights.data_ptr() and held.shape == weights.shape:
                return number
        return None


def _digest(tensor: Tensor) -> str:
    content = np.ascontiguousarray(tensor.detach().numpy())
    digest = hashlib.sha256(f"{content.dtype} {content.shape}\n".encode())
    digest.update(content.data)
    return digest.hexdigest()


def _take_no_note(num_steps: int, num_examples: float) -> None:
    """Leave local training unobserved."""


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


def groups_of(
    clients: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return the number of the group of each client: a named one or its own.

    Raises ConfigError if a named group has none of the clients.
    """
    empty = [name for name, members in groups.items() if not {*members} & {*clients}]
    if empty:
        message = (
            f"found none of the seen clients in {', '.join(empty)}, expected one at "
            f"least; seen clients are called {', '.join(clients[:3])} and so on"
        )
        raise ConfigError([Problem("method.groups", message)])
    named = {client: name for name, members in groups.items() for client in members}
    keys = [(client in named, named.get(client, client)) for client in clients]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return {client: numbers[key] for client, key in zip(clients, keys, strict=True)}


def shares_and_losses(
    task: Task, weights: Tensor, examples: Examples, kinds: Tensor, num_kinds: int
) -> tuple[Tensor, Tensor]:
    """Return the share of each kind of example, and its mean loss; 0 without any.

    ``weights``: Shape (num_weights,). ``kinds``: Of each example, int64 of shape (n,),
    below ``num_kinds``.
    """
    losses = task.losses(weights, examples)
    counts = torch.bincount(kinds, minlength=num_kinds)
    sums = torch.zeros(num_kinds).index_add_(0, kinds, losses)
    return counts / max(1, len(examples)), sums / counts.clamp_min(1)


def example_weights_of(
    label_factors: Tensor | None, examples: Examples
) -> Tensor | None:
    """Return each example's factor, shape (n,), with mean 1; or all 0."""
    if label_factors is None:
        return None
    factors = label_factors[examples.labels]
    return factors / denominator(factors.mean())


def first_layers(model: FlatModel, num_layers: int) -> Tensor:
    """Return which weights belong to the first layers, bool of shape (num_weights,).

    A layer is a module with weight matrices or kernels, and the modules with vectors
    only, such as normalisation, that come between it and the next. They are counted in
    the order in which the model defines them, those of the head last.
    """
    numbers = _layer_numbers(model)
    return model.mask(lambda module: numbers[module] <= num_layers)


def layers_left(model: FlatModel, num_taken: int, setting: str) -> int:
    """Return how many layers a model has beside so many of them.

    Raises ConfigError if none is left to be shared.
    """
    num_layers = max(_layer_numbers(model).values())
    if num_taken >= num_layers:
        message = (
            f"found {num_taken}, expected at most {num_layers - 1}: of the model's "
            f"{num_layers} layers at least one is shared; give fewer, or choose the "
            "method local, which shares nothing"
        )
        raise ConfigError([Problem(f"method.{setting}", message)])
    return num_layers - num_taken


def _layer_numbers(model: FlatModel) -> Mapping[nn.Module, int]:
    """Return the number, from 1, of the layer of each module that owns weights."""
    most_axes: dict[nn.Module, int] = {}
    for entry in model.entries:
        axes = len(entry.shape) if entry.is_parameter else 0
        most_axes[entry.module] = max(most_axes.get(entry.module, 0), axes)
    head = set(model.module.classifier.modules())
    numbers: dict[nn.Module, int] = {}
    last = 0
    for module in sorted(model.module.modules(), key=lambda one: one in head):
        if module in most_axes:
            last += most_axes[module] > 1
            numbers[module] = max(last, 1)
    return numbers


@dataclass(frozen=True)
class Sample(Record):
    """Some of the server's examples; float32 holds their values exactly."""

    images: Tensor  # Shape (n, height, width, channels), not scaled
    labels: Tensor  # Shape (n,)


def draw_sample(task: Task, most: int, rng: RandomKey) -> Sample:
    """Return ``most`` of the server's examples at random, all if there are fewer.

    Raises RunError if it has none.
    """
    proxy = no_examples(task.spec) if task.proxy is None else task.proxy()
    if len(proxy) == 0:
        raise RunError(
            "a sample of the server's examples is to be sent to a client, and the "
            "server has none; expected partition.proxy_fraction above 0, or another "
            "personalization, such as fine_tuning"
        )
    drawn = _some(proxy, most, rng)
    return Sample(drawn.images.float(), drawn.labels.float())


def taken(
    sample: Sample | None, spec: InputSpec, count: int, rng: RandomKey
) -> Examples:
    """Return ``count`` examples of a sample at random, all if there are fewer."""
    if sample is None:
        return no_examples(spec)
    images = sample.images.to(spec.torch_dtype)
    return _some(Examples(images, sample.labels.to(torch.int64)), count, rng)


def _some(examples: Examples, count: int, rng: RandomKey) -> Examples:
    positions = rng.numpy().permutation(len(examples))[:count]
    return examples.take(torch.from_numpy(np.sort(positions)))
