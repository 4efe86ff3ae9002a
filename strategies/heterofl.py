"""HeteroFL: each client trains a narrower part of one global model.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients", ICLR 2021, Algorithm 1. A client of width r has the
first ⌈r c⌉ of the c channels of each hidden layer. Its parameters W_r are the leading
slice of each of the global model's W in every dimension; inputs and labels stay whole.
It trains W_r as a network of its own, and divides the output of each hidden layer by r
(the paper's Scaler). The server takes for each parameter

    w ← Σ_i a_i w_i / Σ_i a_i    over the participants i that hold it,

with a_i = 1 in the paper. A parameter that no participant holds stays unchanged.

With ``mask_labels`` a client sees its own labels only: its loss replaces the logits of
other labels by 0 (the paper's masked cross-entropy), and it does not hold their rows of
the head.

Departures from the paper:

- A network with BatchNorm is rejected. So the paper's static BatchNorm, which collects
  its statistics after training, is not needed.
- A client's width is the same in all rounds (the paper's "fix", not its "dynamic").
- Each client draws its width independently, so the shares of widths hold on average.
- Gradients are clipped as the training section sets; the authors' code clips those of
  each mini-batch to a norm of 1.
- A row of the head is averaged over all participants unless ``mask_labels`` is set; in
  the code it is averaged over participants that have its label in either case.
- A client serves its sub-model with the Scaler, as it was trained. The paper evaluates
  the whole model, where r = 1. Masks do not apply to the served model.
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
from typing_extensions import override

from knnper.data.examples import ClientData, blank_input
from knnper.embedding_model import EmbeddingModel
from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment
from knnper.flat_model import FlatModel
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, PositiveFraction, Settings
from knnper.strategies.core.averaging import Updates
from knnper.strategies.core.method import ALL_DIFFER, UNSEEN_CLIENT, Method, wrong_shape
from knnper.strategies.core.predictors import ModelPredictor
from knnper.strategies.core.records import ModelState, ModelUpdate, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import local_sgd

_MULTIPLYING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class HeteroFLSettings(Settings):
    """The widths of the clients' sub-models.

    Attributes
    ----------
    widths
        r, the fractions of the hidden channels, (0, 1]; by default the paper's levels a
        to e.
    shares
        The relative frequency of each of the ``widths`` among clients; empty is
        uniform.
    assignment
        How a client gets its width: by ``chance``, or by the ``speed`` of its device in
        virtual time, the slowest clients having the smallest widths.
    client_widths
        Widths of clients by name; they take precedence. Clients of a simulation are
        named 0000, 0001 and so on, in the order of their names in the data.
    client_weights
        a_i: 1 for all clients that hold a parameter (``equal``, as in the paper) or
        their number of examples (``size``, as in FedAvg).
    scaler
        Whether outputs of hidden layers are divided by r.
    mask_labels
        Whether clients learn from the logits of their own labels only, as in the
        paper's experiments with few labels per client.
    """

    widths: Annotated[tuple[PositiveFraction, ...], Field(min_length=1), ALL_DIFFER] = (
        1.0,
        0.5,
        0.25,
        0.125,
        0.0625,
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
                f"{len(self.widths)} widths, or none for equal shares"
            )


@dataclass(frozen=True)
class SubModel(Record):
    """The payload of a client."""

    weights: Tensor  # W_r, shape (num_weights of the sub-model,)
    width: float  # r


@dataclass(frozen=True)
class Part:
    """A sub-model within the global model."""

    task: Task  # with the narrower network
    places: Tensor  # positions of its weights in the global model, int64
    labels: Tensor  # label of the row of the head with each weight, int64; else -1
    work: float  # multiplications for an example, relative to the global model


class HeteroFL(Method):
    """One global model; each client trains a part of a width that it can afford."""

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
                "found a network with BatchNorm, expected one without, such as norm: "
                "none, since its statistics would differ between widths"
            )
            raise ConfigError([Problem("model", message)])
        if smallest < 1 and task.frozen:
            message = "found frozen weights, expected that all are trained"
            raise ConfigError([Problem("model.trained", message)])
        self._part(smallest)  # fails now, not in a round, if it cannot be built

    @staticmethod
    @override
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
                "found true with training.compression, expected one of the two: the "
                "server infers a client's labels from the rows that did not change, "
                "which compression hides"
            )
            return (Problem("method.mask_labels", message),)
        return ()

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> ModelState:
        named = self.settings.client_widths
        if named and not named.keys() & {*clients}:
            message = (
                f"found none of the seen clients, which are named "
                f"{', '.join(clients[:3])} and so on, in a simulation by their number; "
                "expected at least one"
            )
            raise ConfigError([Problem("method.client_widths", message)])
        return ModelState(self.task.initial_weights)

    def width(self, client_id: str) -> float:
        """Return r of a client, the same in all rounds; 1 for `UNSEEN_CLIENT`."""
        chosen = self.settings
        if client_id in chosen.client_widths:
            return chosen.client_widths[client_id]
        if client_id == UNSEEN_CLIENT:
            return 1.0
        # In both cases the rank is uniform in (0, 1) over the clients.
        if chosen.assignment == "speed":
            rank = NormalDist().cdf(self.task.key.device(client_id)[0])
        else:
            rank = self.task.key.child("width", client_id).numpy().random()
        shares = chosen.shares or (1.0,) * len(chosen.widths)
        ordered = sorted(zip(chosen.widths, shares, strict=True))
        ends = list(itertools.accumulate(share for _, share in ordered))
        place = bisect.bisect_right(ends, rank * ends[-1])
        return ordered[min(place, len(ordered) - 1)][0]

    @override
    def num_weights(self, client_id: str) -> int:
        return len(self._part(self.width(client_id)).places)

    @override
    def work(self, client_id: str) -> float:
        return self._part(self.width(client_id)).work

    @override
    def broadcast(self, state: ModelState, client_id: str, rng: RandomKey) -> SubModel:
        width = self.width(client_id)
        return SubModel(state.weights[self._part(width).places], width)

    @override
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

    @override
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

    @override
    def personalize(
        self, payload: SubModel, client_state: Any, data: ClientData, rng: RandomKey
    ) -> ModelPredictor:
        return ModelPredictor(self._part(payload.width).task, payload.weights)

    @override
    def update_problem(self, payload: SubModel, update: ModelUpdate) -> str | None:
        return wrong_shape(update, weights=tuple(payload.weights.shape))

    def _part(self, width: float) -> Part:
        """Return the part of the global model of this width, from a cache."""
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
    """Return the positions of a sub-model's weights in the whole model.

    int64, shape (part.num_weights,). Each tensor must be the leading slice, in every
    dimension, of the whole model's tensor of the same name; else ConfigError is raised.
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
    """Return the label of each weight in a row of the head, int64; -1 for others."""
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
    """Return a mask of the weights that a client holds, without rows of absent labels.

    Rows of absent labels return unchanged. ``labels`` are those of `Part`, and
    ``moved`` marks the weights that differ from the payload.
    """
    trained = torch.zeros(int(labels.max()) + 1, dtype=torch.bool)
    trained[labels[moved & (labels >= 0)]] = True
    return (labels < 0) | trained[labels]


def _layers(module: EmbeddingModel, *, hidden: bool = False) -> Iterator[nn.Module]:
    """Yield the linear and convolutional layers; with ``hidden`` without the head's."""
    head = {*module.classifier.modules()} if hidden else set[nn.Module]()
    for layer in module.modules():
        if isinstance(layer, _MULTIPLYING) and layer not in head:
            yield layer


def _multiplications(task: Task) -> int:
    """Count the multiplications of the layers in a forward pass of one example."""
    counts: list[int] = []

    def count(layer: Any, _: Any, output: Tensor) -> None:
        counts.append(output.numel() * layer.weight[0].numel())

    module = task.model.module
    hooks = [layer.register_forward_hook(count) for layer in _layers(module)]
    image = blank_input(task.spec)
    try:
        with torch.inference_mode():
            module.eval()(task.normalize(image.to(task.model.device)))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts)
