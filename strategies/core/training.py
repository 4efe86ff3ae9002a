"""Local training: the one loop of SGD.

Methods differ by what they pass to `local_sgd`: a hook on the gradient, a mask of the
trainable weights, weights of examples, another objective, or a step of their own.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnper.data.augmentation import AUGMENTATIONS
from knnper.data.examples import TEXTS, Examples
from knnper.embedding_model import Criterion, EmbeddingModel
from knnper.experiment import TrainingSettings
from knnper.flat_model import FlatModel
from knnper.seeding import RandomKey
from knnper.strategies.core.optimizers import Sgd, optimizer
from knnper.strategies.core.private_examples import PrivateGradients, poisson_batches
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.core.task import Task

_WARMUPS = 3  # passes before a GPU can record one, as torch recommends

GradientHook = Callable[[Tensor, Tensor], None]
"""``(gradient, parameters) -> None``; see `local_sgd`."""

Objective = Callable[[EmbeddingModel, Tensor, Tensor], Tensor]
"""``(module, inputs, labels) -> losses``: of each example, shape (n,), or their mean.

Inputs are normalised; labels are int64 of shape (n,).
"""


def cross_entropy(module: EmbeddingModel, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the model's own loss of each example, shape (n,); mostly -log h(x)[y]."""
    return module.losses(inputs, labels)


def head_cross_entropy(
    module: EmbeddingModel, embeddings: Tensor, labels: Tensor
) -> Tensor:
    """Return the head's loss on embeddings (n, p), shape (n,)."""
    return module.criterion(module.head(embeddings).float(), labels)


@dataclass(frozen=True)
class Batch:
    """A mini-batch on the model's device."""

    examples: Examples  # augmented
    weights: Tensor | None  # factors on the losses, shape (n,); None is 1


@dataclass(frozen=True)
class RecordedPass:
    """A forward and backward pass recorded as a CUDA graph.

    A replay reads and writes the same memory as the pass that was recorded.
    """

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]  # images, labels and weights that a replay reads
    loss: Tensor  # written by a replay
    gradients: Sequence[Tensor | None]  # of separate tensors, written by a replay


def _tensors_of(batch: Batch) -> list[Tensor]:
    examples, weights = batch.examples, batch.weights
    tensors = [examples.images, examples.labels]
    return tensors if weights is None else [*tensors, weights]


class LocalModel:
    """The model, the data and the optimizer during local training.

    `local_sgd` makes it, from its own arguments, and passes it to each local step.
    ``needs_gradient``: whether a step needs all gradients in one vector, `gradient`.
    """

    def __init__(
        self,
        task: Task,
        examples: Examples,
        learning_rate: float,
        rng: RandomKey,
        *,
        gradient_hook: GradientHook | None,
        example_weights: Tensor | None,
        trainable: Tensor | None,
        objective: Objective,
        needs_gradient: bool,
    ) -> None:
        device, size = task.model.device, task.training.batch_size
        self.task = task
        self.learning_rate = learning_rate
        # Marks the examples that were in a mini-batch so far.
        self.visited = torch.zeros(len(examples), dtype=torch.bool)
        self._examples = Examples(
            examples.images.to(device), examples.labels.to(device)
        )
        weights = _with_class_weights(task, examples.labels, example_weights)
        self._weights = None if weights is None else weights.to(device)
        self._positions = mini_batches(len(examples), size, rng)
        self._private: PrivateGradients | None = None
        if task.training.example_privacy is not None:
            sampler = task.noise_source(rng.child("private batches"))
            self._positions = poisson_batches(len(examples), size, sampler)
            self._private = PrivateGradients(
                task,
                objective,
                trainable,
                len(examples),
                task.noise_source(rng.child("private gradients")),
            )
        self._other_positions = mini_batches(len(examples), size, rng.child("other"))
        self._augment = self._augmentation(rng)
        self._gradient_hook = gradient_hook
        self._objective = objective
        # A tensor without a trainable weight gets no gradient, but a hook, weight decay
        # or another optimizer than SGD can still move it.
        plain = task.training.optimizer.name == "SGD"
        decays = not plain or task.training.weight_decay > 0
        moves = gradient_hook is not None or decays or self._private is not None
        self._fixed: tuple[Tensor, Tensor] | None = None
        if moves and trainable is not None:
            where = ~trainable[: task.model.num_parameters].to(device)
            self._fixed = where, self.parameters[where].clone()
        self._optimizer = optimizer(task, learning_rate)
        # Tensors with separate gradients; if empty, the vector `gradient` is filled.
        self._separate = [] if needs_gradient else task.model.tensors

    @property
    def parameters(self) -> Tensor:
        """The current parameters, shape (num_parameters,), in the model's memory."""
        return self.task.model.parameters.detach()

    @property
    def gradient(self) -> Tensor:
        """The gradient of the last `backward`, (num_parameters,), on the device."""
        return self.task.model.gradient

    def next_batch(self) -> Batch:
        """Return the next mini-batch; each epoch has a new permutation."""
        return self._batch(next(self._positions))

    def independent_batch(self) -> Batch:
        """Return the next mini-batch of a second sequence of permutations.

        A step that needs several mini-batches leaves the sequence of `next_batch` as it
        is in SGD.
        """
        return self._batch(next(self._other_positions))

    def _batch(self, positions: Tensor) -> Batch:
        self.visited.numpy()[positions.numpy()] = True  # much faster than in torch
        # Non-blocking, so that the GPU need not wait for the copy.
        chosen = positions.to(self.task.model.device, non_blocking=True)
        batch = self._examples.take(chosen)
        images = self._augment(batch.images)
        weights = None if self._weights is None else self._weights[chosen]
        return Batch(Examples(images, batch.labels), weights)

    def _augmentation(self, rng: RandomKey) -> Callable[[Tensor], Tensor]:
        chosen = self.task.training.augmentation
        if chosen == "none":  # without a generator: making one takes a step's time
            return lambda images: images
        generator = rng.child("augmentation").numpy()
        return lambda images: AUGMENTATIONS[chosen](images, generator)

    def backward(self, batch: Batch, at: Tensor | None = None) -> Tensor:
        """Compute `gradient`, of the mean loss, and return the loss, a scalar.

        The gradient hook is called. ``at`` are other parameters to compute it at; the
        model's parameters are restored afterwards, while buffers keep the pass.
        """
        if at is None:
            return self._backward(batch)
        parameters = self.parameters.clone()
        try:
            self.parameters.copy_(at)
            return self._backward(batch)
        finally:
            self.parameters.copy_(parameters)

    @contextlib.contextmanager
    def aside(self, buffers: Tensor) -> Iterator[None]:
        """Restore buffers and random state after the passes in a ``with`` block.

        The passes use and update ``buffers`` in place of the model's. Only `gradient`
        keeps their result.
        """
        model = self.task.model
        buffers_before = model.buffers.clone()
        device = model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                model.buffers.copy_(buffers)
                yield
                buffers.copy_(model.buffers)
            finally:
                model.buffers.copy_(buffers_before)

    def step(self) -> None:
        """Make a step of the optimizer along `gradient`."""
        self._optimizer.step()
        if self._fixed is not None:
            where, values = self._fixed
            self.parameters[where] = values

    def _backward(self, batch: Batch) -> Tensor:
        model = self.task.model
        if self._private is not None:
            inputs = self.task.normalize(batch.examples.images)
            self._private.fill(inputs, batch.examples.labels, batch.weights)
            loss = torch.tensor(math.nan)  # it depends on the examples, without noise
        else:
            loss = self._replayed(batch) if self._is_replayable else self._pass(batch)
        if self._separate:
            return loss
        if (longest := self.task.training.clip_norm) is not None:
            norm = torch.linalg.vector_norm(model.gradient)
            model.gradient.mul_(longest / norm.clamp_min(longest))
        if self._gradient_hook is not None:
            self._gradient_hook(model.gradient, self.parameters)
        return loss

    @property
    def _is_replayable(self) -> bool:
        module = self.task.model.module
        return (
            self.task.model.device.type == "cuda"
            and module.replayable
            and type(module.criterion) is Criterion
            and self._objective in (cross_entropy, head_cross_entropy)
            # A pass over text depends on the values of its token ids.
            and self.task.spec.dtype not in TEXTS
        )

    def _replayed(self, batch: Batch) -> Tensor:
        """Compute as `_pass` does, by replaying the recorded pass of these shapes."""
        model, tensors = self.task.model, _tensors_of(batch)
        key = (
            *((tensor.shape, tensor.dtype) for tensor in (*tensors, *self._separate)),
            *(self._objective, batch.weights is None, len(self._separate)),
            *(tensor.requires_grad for tensor in model.module.parameters()),
            *(tensor.training for tensor in model.module.modules()),
        )
        if key not in model.recorded:
            model.recorded[key] = self._record(batch)
        recorded: RecordedPass = model.recorded[key]
        for recorded_input, tensor in zip(recorded.inputs, tensors, strict=True):
            recorded_input.copy_(tensor)
        recorded.graph.replay()
        for tensor, gradient in zip(self._separate, recorded.gradients, strict=True):
            tensor.grad = gradient
        return recorded.loss.clone()

    def _record(self, batch: Batch) -> RecordedPass:
        """Record a pass on the GPU, without a change to buffers or random state."""
        model, examples, weights = self.task.model, batch.examples, batch.weights
        images, labels = examples.images.clone(), examples.labels.clone()
        recorded_batch = Batch(
            Examples(images, labels), None if weights is None else weights.clone()
        )
        with self.aside(model.buffers.clone()):
            # The first passes allocate memory, which cannot be recorded.
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARMUPS):
                    self._pass(recorded_batch)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = self._pass(recorded_batch)
        gradients = [tensor.grad for tensor in self._separate]
        return RecordedPass(graph, _tensors_of(recorded_batch), loss, gradients)

    def _pass(self, batch: Batch) -> Tensor:
        """Compute the gradient of the mean loss, and return the loss."""
        model, examples = self.task.model, batch.examples
        with self.task.autocast():
            inputs = self.task.normalize(examples.images)
            losses = self._objective(model.module, inputs, examples.labels)
        if batch.weights is not None:
            model.module.criterion.require_one_each()
        loss = (losses if batch.weights is None else losses * batch.weights).mean()
        if self._separate:
            self._fill_separate(loss)
            return loss.detach()
        model.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _fill_separate(self, loss: Tensor) -> None:
        for tensor in self._separate:
            tensor.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        for tensor in self._separate:
            if tensor.grad is None:  # unused in this step; its momentum still decays
                tensor.grad = torch.zeros_like(tensor)
            elif tensor.grad.is_sparse:  # as of nn.Embedding(sparse=True)
                tensor.grad = tensor.grad.to_dense()


def _with_class_weights(
    task: Task, labels: Tensor, weights: Tensor | None
) -> Tensor | None:
    """Return the factor on the loss of each example, shape (n,); None is 1."""
    chosen = task.training.class_weights
    if chosen is None:
        return weights
    if chosen == "balanced":
        # As scikit-learn's: n / (c n_y), over the c labels present.
        counts = torch.bincount(labels, minlength=task.spec.num_classes)
        present = counts.count_nonzero().clamp_min(1)
        factors = len(labels) / (present * counts.clamp_min(1))
    else:
        factors = torch.tensor(chosen)
    of_each = factors.float()[labels]
    return of_each if weights is None else of_each * weights


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Return the number of mini-batches in one pass; 0 without examples."""
    return num_examples // min(batch_size, num_examples) if num_examples else 0


def mini_batches(
    num_examples: int, batch_size: int, rng: RandomKey
) -> Iterator[Tensor]:
    """Yield the positions of each mini-batch, int64 of shape (batch,), without end.

    Each epoch has a new permutation. An incomplete last batch is dropped if it is not
    the only one, because a batch of one or two spoils BatchNorm's statistics.
    """
    shuffler = rng.child("batches").numpy()
    per_epoch = steps_per_epoch(num_examples, batch_size)
    size = min(batch_size, num_examples)
    while num_examples:
        order = shuffler.permutation(num_examples)
        for place in range(per_epoch):
            yield torch.from_numpy(order[place * size : (place + 1) * size])


LocalStep = Callable[[LocalModel], Tensor]
"""One step of a client's training: ``local_model -> loss``, a scalar."""


@dataclass(frozen=True)
class LocalResult:
    """The result of local training."""

    weights: Tensor  # trained, shape (num_weights,); unchanged without a step
    num_steps: int  # K, the steps made
    train_loss: float  # mean over the steps, each before its step; NaN without a step

    def update(self, num_examples: int) -> ModelUpdate:
        """Return the update of a client that trained on ``num_examples`` examples."""
        return ModelUpdate(self.weights, num_examples, self.train_loss)


def sgd_step(model: LocalModel) -> Tensor:
    """Make one step of SGD on the next mini-batch; return the loss before it."""
    loss = model.backward(model.next_batch())
    model.step()
    return loss


def step_beside(second: FlatModel, optimizer: Sgd) -> LocalStep:
    """Return a step that also moves a ``second`` model, along its own gradient.

    The objective of `local_sgd` must compute the second model's gradient as well.
    """

    def step(model: LocalModel) -> Tensor:
        second.gradient.zero_()
        loss = sgd_step(model)
        optimizer.step()
        return loss

    return step


def local_sgd(
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
    """Train from ``weights`` (num_weights,) on ``examples`` with mini-batch SGD.

    Parameters
    ----------
    weights
        Where training starts, shape (num_weights,).
    num_epochs
        Passes over the examples; None takes the number of steps from the training
        section.
    gradient_hook
        Called after each backward pass with the gradient, which it may change in place,
        and the parameters, both (num_parameters,) on the model's device.
    example_weights
        Factors on the losses, shape (n,). Their sum over a mini-batch is divided by the
        number of its examples.
    trainable
        Mask of the weights to train, bool of shape (num_weights,). All others, buffers
        included, keep their values. A module without a trainable weight is in
        evaluation mode and costs no backward pass. If the head alone is trained, the
        body costs a single forward pass, unless images are augmented or the model's
        losses need more than the embeddings.
    objective
        The loss to minimise; by default the model's own.
    local_step
        One step of training; by default a step of SGD on the next mini-batch.
    """
    length = num_steps(task.training, num_epochs, len(examples))
    if trainable is not None and not bool(trainable[: task.model.num_parameters].any()):
        length = 0
    if (
        length
        and trainable is not None
        and not bool((trainable & ~task.head_mask).any())
        and objective is cross_entropy
        and local_step is sgd_step
        and task.training.augmentation == "none"
        and task.model.module.learns_from_embeddings
    ):
        # The body is fixed, so embed all examples once and train the head on them.
        embeddings = task.embed(weights, examples.images)
        examples = Examples(embeddings, examples.labels)
        task = replace(task, normalize=lambda embedded: embedded)
        objective = head_cross_entropy
    losses: list[Tensor] = []
    needs_gradient = (
        gradient_hook is not None
        or local_step is not sgd_step
        or task.training.clip_norm is not None
        or task.training.optimizer.name != "SGD"
        or task.training.example_privacy is not None
    )
    apart = contextlib.nullcontext() if needs_gradient else task.model.apart()
    with _training(task, weights, trainable), rng.child("model").torch(), apart:
        model = LocalModel(
            task,
            examples,
            learning_rate,
            rng,
            gradient_hook=gradient_hook,
            example_weights=example_weights,
            trainable=trainable,
            objective=objective,
            needs_gradient=needs_gradient,
        )
        losses.extend(local_step(model) for _ in range(length))
    trained = task.model.read()
    if trainable is not None:
        trained = torch.where(trainable, trained, weights)
    train_loss = float(torch.stack(losses).mean()) if losses else math.nan
    task.on_trained(len(losses), _effective_number(model.visited, example_weights))
    return LocalResult(trained, len(losses), train_loss)


def _effective_number(visited: Tensor, weights: Tensor | None) -> float:
    """Return the effective number of examples trained on, (Σ w_i)² / Σ w_i².

    Kish, "Survey Sampling", 1965, section 11.7. With equal weights it is the number of
    different examples. ``visited`` and ``weights`` have shape (n,).
    """
    if weights is None:
        return float(visited.sum())
    used = weights[visited].double()
    squares = float((used**2).sum())
    return float(used.sum()) ** 2 / squares if squares else 0.0


@contextlib.contextmanager
def _training(task: Task, weights: Tensor, trainable: Tensor | None) -> Iterator[None]:
    """Load the weights, and set the trainable modules to training mode."""
    model = task.model
    model.load(weights)
    if not model.module.training:  # `train` walks through all layers
        model.module.train()
    with contextlib.nullcontext() if trainable is None else model.freezing(trainable):
        yield


def num_steps(
    training: TrainingSettings, num_epochs: int | None, num_examples: int
) -> int:
    """Return the number of steps of `local_sgd` on ``num_examples`` examples."""
    per_epoch = steps_per_epoch(num_examples, training.batch_size)
    if num_epochs is not None:
        return num_epochs * per_epoch
    if training.local_steps is not None:
        return training.local_steps if num_examples else 0
    return (training.local_epochs or 1) * per_epoch
