"""HeteroFL: clients train the part of one global model that they can afford.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients", ICLR 2021, Algorithm 1. A client of width r has the
first ⌈r c⌉ of the c channels of each hidden layer, so that its parameters W_r are the
first ones of each of the global model's W in every dimension; inputs and labels stay
whole. It trains W_r as a network of its own, in which the output of each hidden layer
is divided by r (the paper's Scaler). The server takes for each parameter

    w ← Σ_i a_i w_i / Σ_i a_i    over the participants i that hold it,

with a_i = 1 in the paper, and leaves one as it is that none of them holds.

With ``mask_labels`` a client sees its own labels alone: the logits of the others are
replaced by 0 in its loss (the paper's masked cross-entropy), and their rows of the head
are held by those clients only that have the label.

Departures: a network with BatchNorm is refused, so that the paper's static one, whose
statistics are collected after training, is not needed. A client's width is the same in
all rounds (the paper's "fix", not its "dynamic"). Each client draws its width by
itself, so that the shares of the widths hold on average. Gradients are clipped only
where the training section says so; the authors' code clips those of each mini-batch to
a norm of 1. A row of the head is averaged over all participants unless ``mask_labels``
is set; in the code over those that have its label, with or without the mask. A
sub-model is served as it was trained, with its Scaler, which the paper has in training
alone, as it evaluates the whole model; there r = 1. Masks are not applied to what is
served.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from knnper.data.examples import ClientData
from knnper.embedding_model import EmbeddingModel, FlatModel
from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, PositiveFraction, Settings
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.method import (
    ALL_DIFFER,
    UNSEEN_CLIENT,
    Method,
    wrong_shape,
)
from knnper.strategies.core.records import ModelState, ModelUpdate, Record
from knnper.strategies.core.task import ModelPredictor, Task
from knnper.strategies.core.training import local_sgd


@dataclass(frozen=True)
class HeteroFLSettings(Settings):
    """Which clients have which part of the model.

    Attributes
    ----------
    widths
        r, the parts of the hidden channels that clients have; the paper's levels a to e
        by default.
    shares
        The part of the clients that has each of the ``widths``, relative to the others;
        none is all alike.
    assignment
        How a client gets its width: by ``chance``, or by the ``speed`` of its device in
        virtual time, so that the slowest clients have the smallest widths.
    client_widths
        Widths of clients by name, which come before all this. Those of a simulation are
        called 0000, 0001 and so on, in the order of their names in the data.
    client_weights
        a_i: whether clients that hold a parameter count the same (``equal``, the
        paper's) or as their examples do (``size``, FedAvg's).
    scaler
        Whether outputs of hidden layers are divided by r.
    mask_labels
        Whether clients learn from the logits of their own labels alone, as in the
        paper's experiments on clients with few labels each.
    """

    widths: Annotated[tuple[PositiveFraction, ...], Field(min_length=1), ALL_DIFFER] = (
        *(1.0, 0.5, 0.25, 0.125, 0.0625),
    )
    shares: tuple[PositiveFloat, ...] = ()
    assignment: Literal["chance", "speed"] = "chance"
    client_widths: dict[str, PositiveFraction] = field(default_factory=dict)
    client_weights: Literal["equal", "size"] = "equal"
    scaler: bool = True
    mask_labels: bool = False

    def __post_init__(self) -> None:
        if len(self.shares) not in (0, len(self.widths)):
            raise ValueError(
                f"found {len(self.shares)} shares, expected one for each of the "
                f"{len(self.widths)} widths, or none for equal ones"
            )


_MULTIPLYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class SubModel(Record):
    """The payload of a client."""

    weights: Tensor  # W_r, shape (num_weights of the sub-model,)
    width: float  # r


@dataclass(frozen=True)
class Part:
    """A sub-model within the global model."""

    task: Task  # Of the narrower network
    places: Tensor  # Where each of its weights is in the global ones, int64
    labels: Tensor  # The label whose row of the head a weight is in, int64; else -1
    work: float  # Multiplications of an example, in those of the global model


class HeteroFL(Method):
    """One global model, of which each client trains the part that it can afford."""

    title = "HeteroFL"
    source = "Diao et al. 2021, Algorithm 1"
    upload = "the client's part: about r²"
    download = "the client's part: about r²"
    unseen = "the whole global model"
    allows_batch_norm = False
    reference_title = "HeteroFL (whole model)"
    ends_with_global_model = True
    payload_type = SubModel

    settings: HeteroFLSettings

    def __init__(self, task: Task, settings: HeteroFLSettings) -> None:
        super().__init__(task, settings)
        self._parts: dict[float, Part] = {}
        smallest = min((*settings.widths, *settings.client_widths.values()))
        if smallest < 1 and len(task.model.buffers):
            message = (
                "found a network with BatchNorm, whose statistics differ from width to "
                "width; expected one without, such as norm: none"
            )
            raise ConfigError([Problem("model", message)])
        if smallest < 1 and task.frozen:
            message = "found weights that are not trained, expected all"
            raise ConfigError([Problem("model.trained", message)])
        self._part(smallest)  # that it can be built, before the first round

    @staticmethod
    def check(settings: HeteroFLSettings, experiment: Experiment) -> Sequence[Problem]:
        devices = experiment.training.devices
        if settings.assignment == "speed" and (devices is None or devices.trace):
            message = (
                "found speed, expected training.devices without a trace, from which "
                "the speeds of clients follow; or give client_widths"
            )
            return (Problem("method.assignment", message),)
        if settings.mask_labels and experiment.training.compression is not None:
            message = (
                "found true with training.compression, expected one of the two: which "
                "labels a client has is told by what did not change, and a code tells "
                "no such thing"
            )
            return (Problem("method.mask_labels", message),)
        return ()

    def init(self, clients: Sequence[str], rng: RandomKey) -> ModelState:
        named = self.settings.client_widths
        if named and not named.keys() & {*clients}:
            message = (
                f"found none of the seen clients, which are called "
                f"{', '.join(clients[:3])} and so on, in a simulation by their place; "
                "expected one at least"
            )
            raise ConfigError([Problem("method.client_widths", message)])
        return ModelState(self.task.initial_weights)

    def width(self, client_id: str) -> float:
        """Return r of a client, the same in all rounds; 1 of any unseen one."""
        chosen = self.settings
        if client_id in chosen.client_widths:
            return chosen.client_widths[client_id]
        if client_id == UNSEEN_CLIENT:
            return 1.0
        # Uniform between 0 and 1 over the clients, either way.
        if chosen.assignment == "speed":
            rank = NormalDist().cdf(self.task.key.device(client_id)[0])
        else:
            rank = self.task.key.child("width", client_id).numpy().random()
        shares = chosen.shares or (1.0,) * len(chosen.widths)
        ordered = sorted(zip(chosen.widths, shares, strict=True))
        ends = list(itertools.accumulate(share for _, share in ordered))
        place = bisect.bisect_right(ends, rank * ends[-1])
        return ordered[min(place, len(ordered) - 1)][0]

    def num_weights(self, client_id: str) -> int:
        return len(self._part(self.width(client_id)).places)

    def work(self, client_id: str) -> float:
        return self._part(self.width(client_id)).work

    def broadcast(self, state: ModelState, client_id: str, rng: RandomKey) -> SubModel:
        width = self.width(client_id)
        return SubModel(state.weights[self._part(width).places], width)

    def local_update(
        self, payload: SubModel, data: ClientData, rate: float, rng: RandomKey
    ) -> ModelUpdate:
        part, examples = self._part(payload.width), data.train
        masks: dict[str, Any] = {}
        if self.settings.mask_labels:
            label_counts = torch.bincount(
                examples.labels, minlength=self.task.spec.num_classes
            )
            absent = (label_counts == 0).to(part.task.model.device)

            def losses(
                module: EmbeddingModel, inputs: Tensor, labels: Tensor
            ) -> Tensor:
                logits = module(inputs).float().masked_fill(absent, 0.0)
                return module.criterion(logits, labels)

            held = (part.labels < 0) | (label_counts > 0)[part.labels]
            masks = {"objective": losses, "trainable": held}
        trained = local_sgd(part.task, payload.weights, examples, rate, rng, **masks)
        return trained.update(len(examples))

    def aggregate(self, state: ModelState, updates: Updates[ModelUpdate]) -> ModelState:
        sums = torch.zeros(len(state.weights), dtype=torch.float64)
        totals = torch.zeros_like(sums)
        for client_id, update in updates:
            part, weights = self._part(self.width(client_id)), update.weights
            places = part.places
            if self.settings.mask_labels:
                held = _held(part.labels, weights != state.weights[places])
                places, weights = places[held], weights[held]
            weight = 1.0
            if self.settings.client_weights == "size":
                weight = float(update.num_examples)
            sums[places] += weight * weights.double()
            totals[places] += weight
        means = (sums / totals.where(totals > 0, 1.0)).float()
        return ModelState(means.where(totals > 0, state.weights))

    def personalize(
        self, payload: SubModel, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        return ModelPredictor(self._part(payload.width).task, payload.weights)

    def update_problem(self, payload: SubModel, update: ModelUpdate) -> str | None:
        return wrong_shape(update, weights=tuple(payload.weights.shape))

    def _part(self, width: float) -> Part:
        """Return the part of the global model of this width, made when first asked."""
        if width not in self._parts:
            self._parts[width] = self._new_part(width)
        return self._parts[width]

    def _new_part(self, width: float) -> Part:
        whole = self.task
        if width == 1:
            places = torch.arange(whole.model.num_weights)
            return Part(whole, places, _labels_of(whole.model), 1.0)
        model = _narrower(whole, width)
        if self.settings.scaler:
            for layer in _layers(model.module, hidden=True):
                layer.register_forward_hook(lambda _, __, output: output / width)
        places = places_in(whole.model, model)
        initial = whole.initial_weights[places]
        task = replace(whole, model=model, initial_weights=initial)
        work = _multiplications(task) / _multiplications(whole)
        return Part(task, places, _labels_of(model), work)


def _narrower(whole: Task, width: float) -> FlatModel:
    if whole.narrower is None:
        message = (
            "found a network of one width, expected one with a setting width, such as "
            "leaf_cnn, tiny_cnn or mlp"
        )
        raise ConfigError([Problem("model", message)])
    try:
        return whole.narrower(width)
    except ValueError as error:
        message = f"the network cannot be made at a width of {width:g}: {error}"
        raise ConfigError([Problem("method.widths", message)]) from error


def places_in(whole: FlatModel, part: FlatModel) -> Tensor:
    """Return where the weights of a sub-model are in those of the whole model.

    int64, shape (part.num_weights,). Its tensors have the same names, and are the first
    ones of the others' in every dimension; a `ConfigError` says that they are not.
    """
    numbered = whole.named(torch.arange(whole.num_weights))
    positions = {
        entry.name: numbered[entry.name][tuple(map(slice, entry.shape))]
        for entry in part.entries
        if entry.name in numbered
    }
    try:
        return part.flatten(positions, torch.int64)
    except ValueError as error:
        message = f"its width changes more than the number of channels: {error}"
        raise ConfigError([Problem("model", message)]) from error


def _labels_of(model: FlatModel) -> Tensor:
    """Return the label whose row of the head each weight is in, int64; else -1."""
    head = {*model.module.classifier.modules()}
    labels = {}
    for entry in model.entries:
        rows = torch.arange(model.module.num_classes)
        if entry.module not in head or entry.shape[0] != len(rows):
            rows = torch.full(entry.shape[:1], -1)
        column = rows.view(-1, *(1 for _ in entry.shape[1:]))
        labels[entry.name] = column.expand(entry.shape)
    return model.flatten(labels, torch.int64)


def _held(labels: Tensor, moved: Tensor) -> Tensor:
    """Return which weights a client holds, bool: not the rows of labels it lacks.

    These came back as they were sent. ``labels`` are of `Part`, ``moved`` where an
    update differs from what was sent.
    """
    trained = torch.zeros(int(labels.max()) + 1, dtype=torch.bool)
    trained[labels[moved & (labels >= 0)]] = True
    return (labels < 0) | trained[labels]


def _layers(module: EmbeddingModel, *, hidden: bool = False) -> Iterator[nn.Module]:
    """Yield the layers that multiply, or of these the ones outside the head."""
    head = {*module.classifier.modules()} if hidden else set[nn.Module]()
    for layer in module.modules():
        if isinstance(layer, _MULTIPLYING) and layer not in head:
            yield layer


def _multiplications(task: Task) -> int:
    """Return how many multiplications the layers need for one example, forward."""
    counts: list[int] = []

    def count(layer: Any, _: Any, output: Tensor) -> None:
        counts.append(output.numel() * layer.weight[0].numel())

    module = task.model.module
    hooks = [layer.register_forward_hook(count) for layer in _layers(module)]
    image = torch.zeros((1, *task.spec.image_shape), dtype=task.spec.torch_dtype)
    try:
        with torch.inference_mode():
            module.eval()(task.normalize(image.to(task.model.device)))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts)
