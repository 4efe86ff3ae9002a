"""The base of methods that share a part of the weights; the rest stays with clients.

Every module is shared or personal, with all its weights. The server's state is a whole
model: the mean of the clients' shared parts, and the personal part of the initial
weights, from which each client starts. The whole model is sent, because the server does
not know which clients have a personal part already.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.errors import ConfigError, Problem
from knnper.flat_model import FlatModel
from knnper.seeding import RandomKey
from knnper.settings import Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.final_training import trained_on_both_splits
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.predictors import ModelPredictor, Predictor
from knnper.strategies.core.records import ModelState, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import LocalResult


@dataclass(frozen=True)
class PersonalPart(Record):
    """The state that a client keeps between rounds."""

    # The personal weights, shape (num_personal,), in their order in the model.
    personal: Tensor


@dataclass(frozen=True)
class SharedUpdate(Record):
    """The update of a client."""

    # The trained shared weights, shape (num_shared,), in their order in the model.
    shared: Tensor
    num_examples: int
    train_loss: float


class PartlyShared(Method):
    """Clients train both parts together and send the shared part.

    If all weights are shared it is FedAvg. A seen client is served the personal part of
    its last round, which was not trained on the validation split; an unseen client
    trains one on both splits. ``shared`` is a mask, bool of shape (num_weights,).
    """

    takes_mean = True
    sends_gradients_only = True
    update_type: type[Record] = SharedUpdate
    client_state_type: type[Record] = PersonalPart

    def __init__(
        self, task: Task, settings: Settings, shared: Tensor, unseen_epochs: int
    ) -> None:
        super().__init__(task, settings)
        if not bool(shared.any()):
            message = (
                "found a model in which no weight would be shared, expected some; "
                "choose another model, or the method local, which shares nothing"
            )
            raise ConfigError([Problem("method.name", message)])
        self.shared, self.personal = shared, ~shared
        self.unseen_epochs = unseen_epochs

    def joined(self, weights: Tensor, part: PersonalPart | None) -> Tensor:
        """Return the server's ``weights`` with a client's personal part."""
        if part is None:
            return weights
        return weights.masked_scatter(self.personal, part.personal)

    def split(
        self, trained: LocalResult, num_examples: int
    ) -> tuple[PersonalPart, SharedUpdate]:
        """Split a trained model into a client's new state and its update."""
        personal = PersonalPart(trained.weights[self.personal])
        shared = trained.weights[self.shared]
        return personal, SharedUpdate(shared, num_examples, trained.train_loss)

    @override
    def client_update(
        self,
        payload: Any,
        client_state: Any,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[Any, Any]:
        rate = self.task.training.learning_rate_at(server_round)
        weights = self.joined(payload.weights, client_state)
        trained = self.train(weights, data.train, rate, rng)
        return self.split(trained, len(data.train))

    @override
    def aggregate(self, state: Any, updates: Updates[Any]) -> Any:
        mean = RunningMean()
        for _, update in updates:
            mean.add(update.shared, update.num_examples)
        return ModelState(state.weights.masked_scatter(self.shared, mean.result()))

    @override
    def personalize(
        self, payload: Any, client_state: Any, data: ClientData, rng: RandomKey
    ) -> Predictor:
        part = part_in_use(client_state, data)
        if part is not None:
            return ModelPredictor(self.task, self.joined(payload.weights, part))
        return trained_on_both_splits(
            self.task,
            payload.weights,
            data,
            rng,
            num_epochs=self.unseen_epochs,
            learning_rate=self.task.first_rate,
            trainable=self.personal,
        )

    @override
    def num_coordinates(self, tensor: Tensor) -> int:
        if tensor.shape != (int(self.shared.sum()),):
            return super().num_coordinates(tensor)
        return int(self.shared[: self.task.model.num_parameters].sum())

    @override
    def update_problem(self, payload: Any, update: Any) -> str | None:
        return wrong_shape(update, shared=(int(self.shared.sum()),))

    @override
    def started_from(self, payload: Any, update: Any) -> Mapping[str, Tensor]:
        return {"shared": _taken(payload.weights, self.shared)}


def part_in_use(part: PersonalPart | None, data: ClientData) -> PersonalPart | None:
    """Return the personal part to serve; None, without data, for the server's."""
    return part if data.num_examples > 0 else None


# Cached, since all clients of a round are sent the same tensor object.
@functools.lru_cache(maxsize=1)
def _taken(weights: Tensor, where: Tensor) -> Tensor:
    return weights[where]


def first_layers(model: FlatModel, num_layers: int) -> Tensor:
    """Return a mask of the weights of the first layers, bool of shape (num_weights,).

    A layer is a module with weight matrices or kernels, together with the modules that
    follow it and own only vectors, such as normalisation. Layers are counted in the
    order in which the model defines them, the head's last.
    """
    numbers = _layer_numbers(model)
    return model.mask(lambda module: numbers[module] <= num_layers)


def last_layers(model: FlatModel, num_layers: int) -> Tensor:
    """Return a mask of the weights of the last layers; see `first_layers`."""
    return ~first_layers(model, max(_layer_numbers(model).values()) - num_layers)


def layers_left(model: FlatModel, num_taken: int, setting: str) -> int:
    """Return the number of layers beside ``num_taken`` personal or shared ones.

    Raises ConfigError, naming ``setting``, if none is left.
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
    """Return the layer number, from 1, of each module that owns weights."""
    most_axes: dict[nn.Module, int] = {}
    for entry in model.entries:
        axes = len(entry.shape) if entry.is_parameter else 0
        most_axes[entry.module] = max(most_axes.get(entry.module, 0), axes)
    head = set(model.module.classifier.modules())
    numbers: dict[nn.Module, int] = {}
    last = 0
    for module in sorted(model.module.modules(), key=lambda module: module in head):
        if module in most_axes:
            last += most_axes[module] > 1
            numbers[module] = max(last, 1)
    return numbers
