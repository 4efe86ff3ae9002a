"""Local training: the one loop of SGD, and what a client trains after the rounds.

When nothing is left to choose, a client learns from both of its splits. Whatever comes
on top and chooses on the validation split, as a memory chooses λ, must not ask a model
that has seen it: it gets the one that was trained in the same way on the training split
alone.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Required, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn, optim
from torch.optim import sgd as torch_sgd
from torch.optim.lr_scheduler import LRScheduler

from knnper.data.augmentation import AUGMENTATIONS
from knnper.data.examples import TEXTS, ClientData, Examples
from knnper.embedding_model import Criterion, EmbeddingModel, FlatModel, OwnLoss
from knnper.errors import ConfigError, OwnCodeError, Problem
from knnper.experiment import (
    Choice,
    Settings,
    SettingsTypes,
    SgdSettings,
    TrainingSettings,
)
from knnper.own import Kind, arguments, explained, given_to, settings_of
from knnper.seeding import RandomKey
from knnper.strategies.core.records import ModelUpdate
from knnper.strategies.core.task import HeadPredictor, ModelPredictor, Task

GradientHook = Callable[[Tensor, Tensor], None]
"""``(gradient, parameters) -> None``; see `local_sgd`."""

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
    return module.criterion(module.head(embeddings).float(), labels)


_GIVEN = ("params", "lr", "foreach", "fused", "capturable", "differentiable")


def _is_optimizer(entry: object) -> bool:
    return isinstance(entry, type) and issubclass(entry, optim.Optimizer)


def _no_optimizer(entry: object) -> str:
    """Advise on an entry that is not a class of optimizers."""
    is_schedule = isinstance(entry, type) and issubclass(entry, LRScheduler)
    return "a schedule of the rate is set in training.schedule" if is_schedule else ""


OWN_OPTIMIZER = Kind(
    "a class of torch optimizers",
    supplied=_GIVEN,
    is_right=_is_optimizer,
    advice=_no_optimizer,
)
"""It is given each tensor of the model as it is."""

# Errors of an optimizer: torch's, an assertion, or one in a user's file.
_FAILURES = (TypeError, ValueError, RuntimeError, AssertionError, OwnCodeError)

OPTIMIZERS: SettingsTypes = {
    "SGD": SgdSettings,
    **{
        kind.__name__: settings_of(kind, Settings, frozenset(_GIVEN))
        for kind in (
            *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
            *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Rprop),
        )
    },
}
"""Those of torch that treat each weight by itself, by their names there."""

OWN_LOSS = Kind(
    "a function (logits, labels) -> loss, or a class of such modules",
    supplied=("input", "target", "reduction", "logits", "labels"),
)

LOSSES: SettingsTypes = {"cross_entropy": Settings}


def criterion(choice: Choice[Settings]) -> Criterion:
    """Return the loss that the training section chooses."""
    if choice.entry is None:
        return Criterion()
    chosen = arguments(choice.settings, Settings)
    chosen |= given_to(choice.entry, reduction="none")
    if isinstance(choice.entry, type):
        return OwnLoss(choice.name, choice.entry(**chosen))
    return OwnLoss(choice.name, functools.partial(choice.entry, **chosen))


@dataclass(frozen=True)
class Batch:
    """A mini-batch on the model's device."""

    examples: Examples  # The examples, augmented
    weights: Tensor | None  # Factor on the loss of each, shape (n,); None is 1


_WARMUPS = 3


@dataclass(frozen=True)
class Recorded:
    """A pass forwards and backwards as a GPU has recorded it."""

    graph: torch.cuda.CUDAGraph
    given: Sequence[Tensor]  # The memory that it reads images and labels from
    loss: Tensor  # The memory that it writes; so are the gradients of tensors apart
    gradients: Sequence[Tensor | None]


def _tensors_of(batch: Batch) -> list[Tensor]:
    examples, weights = batch.examples, batch.weights
    tensors = [examples.images, examples.labels]
    return tensors if weights is None else [*tensors, weights]


class LocalModel:
    """What a local step works with; made by `local_sgd`, with its arguments."""

    def __init__(
        self,
        task: Task,
        examples: Examples,
        learning_rate: float,
        rng: RandomKey,
        gradient_hook: GradientHook | None,
        example_weights: Tensor | None,
        trainable: Tensor | None,
        objective: Objective,
        needs_gradient: bool,
    ) -> None:
        device, size = task.model.device, task.training.batch_size
        self.task = task
        self.learning_rate = learning_rate
        # Which examples a mini-batch has held so far.
        self.visited = torch.zeros(len(examples), dtype=torch.bool)
        self._examples = Examples(
            examples.images.to(device), examples.labels.to(device)
        )
        weights = _with_class_weights(task, examples.labels, example_weights)
        self._weights = None if weights is None else weights.to(device)
        self._positions = mini_batches(len(examples), size, rng)
        self._other_positions = mini_batches(len(examples), size, rng.child("other"))
        self._augment = self._augmentation(rng)
        self._gradient_hook = gradient_hook
        self._objective = objective
        # A tensor of which nothing is trained has no gradient: only these move it.
        plain = task.training.optimizer.name == "SGD"
        decays = not plain or task.training.weight_decay > 0
        moves = gradient_hook is not None or decays
        self._fixed: tuple[Tensor, Tensor] | None = None
        if moves and trainable is not None:
            where = ~trainable[: task.model.num_parameters].to(device)
            self._fixed = where, self.parameters[where].clone()
        self._optimizer = optimizer(task, learning_rate)
        # Those with a gradient of their own; without them `gradient` is filled.
        self._apart = [] if needs_gradient else task.model.tensors

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
        self.visited.numpy()[positions.numpy()] = True  # much faster than torch's
        # A GPU goes on with what it has: a copy of so few bytes is made at once.
        chosen = positions.to(self.task.model.device, non_blocking=True)
        batch = self._examples.take(chosen)
        images = self._augment(batch.images)
        weights = None if self._weights is None else self._weights[chosen]
        return Batch(Examples(images, batch.labels), weights)

    def _augmentation(self, rng: RandomKey) -> Callable[[Tensor], Tensor]:
        chosen = self.task.training.augmentation
        if chosen == "none":  # and no generator, which takes as long as a small step
            return lambda images: images
        generator = rng.child("augmentation").numpy()
        return lambda images: AUGMENTATIONS[chosen](images, generator)

    def backward(self, batch: Batch, at: Tensor | None = None) -> Tensor:
        """Fill `gradient` with that of the mean loss; return the loss, a scalar.

        The gradient hook is called. With other parameters to take it ``at``, the
        model's own are there again afterwards; buffers see one pass more.
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
        """Let passes inside a ``with`` block leave no trace but `gradient`.

        The model's buffers and the random numbers that its layers draw are the same
        afterwards. The passes take ``buffers`` in their place, and update these.
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
        """Let the optimizer step along `gradient`."""
        self._optimizer.step()
        if self._fixed is not None:
            where, values = self._fixed
            self.parameters[where] = values

    def _backward(self, batch: Batch) -> Tensor:
        model = self.task.model
        loss = self._replayed(batch) if self._is_replayable else self._pass(batch)
        if self._apart:
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
            and self.task.spec.dtype not in TEXTS  # whose ids are looked at
        )

    def _replayed(self, batch: Batch) -> Tensor:
        """Do as `_pass`, from what the GPU recorded the first time."""
        model, tensors = self.task.model, _tensors_of(batch)
        key = (
            *((tensor.shape, tensor.dtype) for tensor in (*tensors, *self._apart)),
            *(self._objective, batch.weights is None, len(self._apart)),
            *(tensor.requires_grad for tensor in model.module.parameters()),
            *(tensor.training for tensor in model.module.modules()),
        )
        if key not in model.recorded:
            model.recorded[key] = self._record(batch)
        recorded: Recorded = model.recorded[key]
        for into, memory in zip(recorded.given, tensors, strict=True):
            into.copy_(memory)
        recorded.graph.replay()
        for tensor, gradient in zip(self._apart, recorded.gradients, strict=True):
            tensor.grad = gradient
        return recorded.loss.clone()

    def _record(self, batch: Batch) -> "Recorded":
        """Let the GPU record a pass; weights and random numbers stay as they are."""
        model, examples, weights = self.task.model, batch.examples, batch.weights
        images, labels = examples.images.clone(), examples.labels.clone()
        recorded_batch = Batch(
            Examples(images, labels), None if weights is None else weights.clone()
        )
        with self.aside(model.buffers.clone()):
            # What is made ready at a first pass cannot be recorded.
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARMUPS):
                    self._pass(recorded_batch)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = self._pass(recorded_batch)
        gradients = [tensor.grad for tensor in self._apart]
        return Recorded(graph, _tensors_of(recorded_batch), loss, gradients)

    def _pass(self, batch: Batch) -> Tensor:
        """Fill the gradient with that of the mean loss; return the loss."""
        model, examples = self.task.model, batch.examples
        with self.task.autocast():
            inputs = self.task.normalize(examples.images)
            losses = self._objective(model.module, inputs, examples.labels)
        if batch.weights is not None:
            model.module.criterion.require_one_each()
        loss = (losses if batch.weights is None else losses * batch.weights).mean()
        if self._apart:
            self._fill_apart(loss)
            return loss.detach()
        model.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _fill_apart(self, loss: Tensor) -> None:
        for tensor in self._apart:
            tensor.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        for tensor in self._apart:
            if tensor.grad is None:  # not used in this step: momentum goes on
                tensor.grad = torch.zeros_like(tensor)
            elif tensor.grad.is_sparse:  # as of nn.Embedding(sparse=True)
                tensor.grad = tensor.grad.to_dense()


class Sgd:
    """The steps of ``torch.optim.SGD``, by the function that it calls.

    The class imports what torch compiles with, a second for each process that trains:
    for each worker of a simulation, and each message that a real client answers.

    Tensor by tensor, in all methods: a step of one vector may differ in last bits.
    """

    def __init__(
        self, task: Task, parameters: Sequence[Tensor], learning_rate: float
    ) -> None:
        training, chosen = task.training, task.training.optimizer.settings
        settings = chosen if isinstance(chosen, SgdSettings) else SgdSettings()
        self._parameters = parameters
        self._momentum: dict[Tensor, Tensor | None] = {}
        self._move = functools.partial(
            torch_sgd.sgd,
            lr=learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            dampening=settings.dampening,
            nesterov=settings.nesterov,
            maximize=False,
            fused=True,
        )

    @torch.no_grad()
    def step(self) -> None:
        """Move each parameter that has a gradient."""
        moved = [
            parameter for parameter in self._parameters if parameter.grad is not None
        ]
        gradients = [
            parameter.grad for parameter in moved if parameter.grad is not None
        ]
        momentum = [self._momentum.get(parameter) for parameter in moved]
        self._move(moved, gradients, momentum)
        self._momentum.update(zip(moved, momentum, strict=True))


def optimizer(task: Task, learning_rate: float) -> optim.Optimizer | Sgd:
    """Return the optimizer of local training, as the training section says."""
    chosen, model = task.training.optimizer, task.model
    if chosen.name == "SGD":
        return Sgd(task, model.tensors, learning_rate)
    settings = arguments(chosen.settings, Settings)
    if chosen.entry is not None:
        tensors = [
            parameter
            for parameter in model.module.parameters()
            if parameter.requires_grad
        ]
        built: optim.Optimizer = chosen.entry(tensors, lr=learning_rate, **settings)
        return built
    kind: Callable[..., optim.Optimizer] = getattr(optim, chosen.name)
    return kind([model.parameters], lr=learning_rate, **settings)


def optimizer_problem(chosen: Choice[Settings]) -> str:
    """Return why an optimizer cannot make the steps of local training, or nothing.

    One of the user's is tried on four numbers with a dense gradient.
    """
    if chosen.entry is None:
        return ""
    closure = inspect.signature(chosen.entry.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return (
            f"{chosen.name} needs a closure that computes the loss several times in a "
            "step, and local training computes it once; expected an optimizer with a "
            "step() without arguments, such as AdamW"
        )
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    settings = arguments(chosen.settings, Settings)
    try:
        with explained():
            tried: optim.Optimizer = chosen.entry([weight], lr=1e-3, **settings)
    except _FAILURES:
        return ""  # `require_optimizer` refuses it with the model's own tensors
    try:
        with explained():
            tried.step()
    except _FAILURES as error:
        return (
            f"{chosen.name} fails at its first step: {type(error).__name__}: {error}; "
            "expected an optimizer that steps with dense gradients and no closure"
        )
    return ""


def require_optimizer(task: Task) -> None:
    """Refuse settings that the optimizer does not take, before the first round."""
    try:
        with explained():
            optimizer(task, task.training.learning_rate)
    except (TypeError, ValueError) as error:
        name = task.training.optimizer.name
        message = f"{name} cannot be made with a learning rate and these: {error}"
        raise ConfigError([Problem("training.optimizer", message)]) from error


def _with_class_weights(
    task: Task, labels: Tensor, weights: Tensor | None
) -> Tensor | None:
    """Return the factor on the loss of each example, shape (n,); None is 1."""
    chosen = task.training.class_weights
    if chosen is None:
        return weights
    if chosen == "balanced":
        # As scikit-learn's: n / (c n_y), over the c labels that are there.
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

    Each epoch is a new permutation. The incomplete last batch is left out when a full
    one came before it: a batch of one or two ruins BatchNorm's statistics.
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
    """What local training ends with."""

    # The trained weights, shape (num_weights,); the given ones if nothing was done.
    weights: Tensor
    num_steps: int  # K, the steps that were made
    # Mean loss over the steps, as each one saw it first; NaN without a step.
    train_loss: float

    def update(self, num_examples: int) -> ModelUpdate:
        """Return the update of a client that trained on so many examples."""
        return ModelUpdate(self.weights, num_examples, self.train_loss)


def sgd_step(model: LocalModel) -> Tensor:
    """Make one step of SGD on the next mini-batch; return its loss before."""
    loss = model.backward(model.next_batch())
    model.step()
    return loss


def step_beside(second: FlatModel, optimizer: Sgd) -> LocalStep:
    """Return `sgd_step` with one of a model beside, along its own gradient."""

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

    ``gradient_hook`` is called after each backward pass with the gradient, to be
    changed in place, and the parameters, both (num_parameters,) on the model's device.
    ``example_weights`` (n,) are factors on the losses, whose sum is divided by the
    number of a mini-batch's examples. Weights that are not ``trainable``, a mask, end
    as they were, buffers too; a layer, or a container with all its layers and dropout,
    of which nothing is trained is in evaluation mode and costs no backward pass. Where
    it is the head alone, the body costs one forward pass in all, unless images are
    augmented or the model's losses need more of the inputs than their embeddings.
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
        # The body is as good as a part of the data then: one pass of it will do.
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
    )
    apart = contextlib.nullcontext() if needs_gradient else task.model.apart()
    with _training(task, weights, trainable), rng.child("model").torch(), apart:
        model = LocalModel(
            task,
            examples,
            learning_rate,
            rng,
            gradient_hook,
            example_weights,
            trainable,
            objective,
            needs_gradient,
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


@contextlib.contextmanager
def _training(task: Task, weights: Tensor, trainable: Tensor | None) -> Iterator[None]:
    """Load the model and put it into training mode, but for what is not trained."""
    model = task.model
    model.load(weights)
    if not model.module.training:  # it walks through all layers
        model.module.train()
    with contextlib.nullcontext() if trainable is None else model.freezing(trainable):
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


AnyPredictor = TypeVar("AnyPredictor", ModelPredictor, HeadPredictor)


def on_both_splits(
    data: ClientData, train: Callable[[Examples], AnyPredictor]
) -> AnyPredictor:
    """Return what is served of a client that trains now."""
    served = train(data.train_and_validation())
    if len(data.validation) == 0:
        return served
    return replace(served, trained_alone=lambda: train(data.train))


class SgdOptions(TypedDict, total=False):
    """What `local_sgd` is told besides."""

    learning_rate: Required[float]
    num_epochs: int | None
    gradient_hook: GradientHook | None
    trainable: Tensor | None


def trained_on_both_splits(
    task: Task,
    weights: Tensor,
    data: ClientData,
    rng: RandomKey,
    **options: Unpack[SgdOptions],
) -> ModelPredictor:
    """Return what is served of a client that trains one model now; as `local_sgd`."""

    def train(examples: Examples) -> ModelPredictor:
        trained = local_sgd(task, weights, examples, rng=rng, **options)
        return ModelPredictor(task, trained.weights)

    return on_both_splits(data, train)


def pull(
    center: Tensor,
    weight: float,
    learning_rate: float,
    weight_decay: float,
    where: Tensor | None = None,
) -> GradientHook:
    """Return the hook that pulls a client's parameters towards ``center``.

    It replaces the gradient g at the parameters p by (g + λ ((1 - η d) p - c)) /
    (1 + η λ), with which a step of SGD of rate η and weight decay d is the proximal
    one. Momentum comes on top of it, as on top of any gradient.

    c is ``center``, (num_parameters,), or (num_weights,), whose buffers are left out;
    λ is ``weight``, and with 0 the gradient stays exactly as it is, as does that of
    parameters not in ``where``, of the shape of ``center``. η and d are of the steps.
    """
    shrunk = 1 / (1 + learning_rate * weight)
    strength = weight * shrunk
    decayed = 1 - learning_rate * weight_decay

    @functools.cache
    def on_device(device: torch.device, length: int) -> tuple[Tensor, Tensor | None]:
        mask = None if where is None else where[:length].to(device)
        return center[:length].to(device), mask

    def hook(gradient: Tensor, parameters: Tensor) -> None:
        target, mask = on_device(gradient.device, len(gradient))
        away = decayed * parameters - target
        pulled = (shrunk * gradient).add_(away, alpha=strength)
        gradient.copy_(pulled if mask is None else torch.where(mask, pulled, gradient))

    return hook
