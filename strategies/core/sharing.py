"""What methods have in common that share a part of the weights and no more.

Every weight is shared or personal, as the module that owns it is. The server's state
holds a whole model: the mean of the clients' shared parts, and the personal part of
the initial weights, from which a client starts its own. The whole of it is sent, as the
server does not know whether a client has a personal part.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from knnper.data.examples import ClientData
from knnper.errors import ConfigError, Problem
from knnper.experiment import Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.method import Method, wrong_shape
from knnper.strategies.core.predictors import ModelPredictor, Predictor
from knnper.strategies.core.records import ModelPayload, ModelState, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import (
    LocalResult,
    newcomer_rate,
    trained_on_both_splits,
)


@dataclass(frozen=True)
class PersonalPart(Record):
    """What a client keeps between rounds."""

    # Its own weights, shape (num_personal,), in their order in the model.
    personal: Tensor


@dataclass(frozen=True)
class SharedUpdate(Record):
    """What a client sends back."""

    # The trained shared weights, shape (num_shared,), in their order in the model.
    shared: Tensor
    num_examples: int
    train_loss: float


@dataclass(frozen=True)
class Sharing:
    """Which weights of a model are shared.

    Attributes
    ----------
    shared
        bool, shape (num_weights,); the others are personal.

    Raises ConfigError if none is.
    """

    shared: Tensor

    def __post_init__(self) -> None:
        if not bool(self.shared.any()):
            message = (
                "found a model of which no weight would be shared, expected some; "
                "choose another model, or the method local, which shares nothing"
            )
            raise ConfigError([Problem("method.name", message)])

    @property
    def personal(self) -> Tensor:
        """Which weights are personal, bool of shape (num_weights,)."""
        return ~self.shared

    def join(self, weights: Tensor, part: PersonalPart | None) -> Tensor:
        """Return what a client with this part makes of the server's model.

        ``weights``: Shape (num_weights,).
        """
        if part is None:
            return weights
        return _placed(weights, self.personal, part.personal)

    def split(
        self, trained: LocalResult, num_examples: int
    ) -> tuple[PersonalPart, SharedUpdate]:
        """Return what a client keeps of a trained model, and what it sends."""
        kept = PersonalPart(trained.weights[self.personal])
        shared = trained.weights[self.shared]
        return kept, SharedUpdate(shared, num_examples, trained.train_loss)

    def sent(self, weights: Tensor) -> dict[str, Tensor]:
        """Return what the tensors of an update started from, by their name."""
        return {"shared": _taken(weights, self.shared)}

    def average(self, state: ModelState, updates: Updates[SharedUpdate]) -> ModelState:
        """Return the state with the mean of the shared parts, weighted by examples."""
        mean = RunningMean()
        for _, update in updates:
            mean.add(update.shared, update.num_examples)
        return ModelState(_placed(state.weights, self.shared, mean.result()))


class PartlyShared(Method):
    """The method whose clients train both parts together and share one.

    With all of them shared it is FedAvg. A client with a personal part is served that
    of its last round, which never trained on its validation split.

    ``shared``: Which weights are shared, bool of shape (num_weights,).
    ``unseen_epochs``: Passes over both splits in which a client without a personal part
    trains one at the hand-over.
    """

    update_type = SharedUpdate
    client_state_type = PersonalPart

    def __init__(
        self, task: Task, settings: Settings, shared: Tensor, unseen_epochs: int
    ) -> None:
        super().__init__(task, settings)
        self.sharing = Sharing(shared)
        self.unseen_epochs = unseen_epochs

    def client_update(
        self,
        payload: ModelPayload,
        client_state: PersonalPart | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[PersonalPart, SharedUpdate]:
        rate = self.task.training.learning_rate_at(server_round)
        weights = self.sharing.join(payload.weights, client_state)
        trained = self.train(weights, data.train, rate, rng)
        return self.sharing.split(trained, len(data.train))

    def aggregate(
        self, state: ModelState, updates: Updates[SharedUpdate]
    ) -> ModelState:
        return self.sharing.average(state, updates)

    def personalize(
        self,
        payload: ModelPayload,
        client_state: PersonalPart | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        part = part_in_use(client_state, data)
        if part is not None:
            weights = self.sharing.join(payload.weights, part)
            return ModelPredictor(self.task, weights)
        return trained_on_both_splits(
            self.task,
            payload.weights,
            data,
            rng,
            num_epochs=self.unseen_epochs,
            learning_rate=newcomer_rate(self.task),
            trainable=self.sharing.personal,
        )

    def update_problem(self, payload: ModelPayload, update: SharedUpdate) -> str | None:
        return wrong_shape(update, shared=(int(self.sharing.shared.sum()),))

    def started_from(
        self, payload: ModelPayload, update: SharedUpdate
    ) -> Mapping[str, Tensor]:
        return self.sharing.sent(payload.weights)


def part_in_use(part: PersonalPart | None, data: ClientData) -> PersonalPart | None:
    """Return the part that a client is served with; None for the server's."""
    return part if len(data.train) + len(data.validation) > 0 else None


# All clients of a round are sent one tensor. It is found by its identity.
@functools.lru_cache(maxsize=1)
def _taken(weights: Tensor, where: Tensor) -> Tensor:
    return weights[where]


def _placed(weights: Tensor, where: Tensor, values: Tensor) -> Tensor:
    """Return a copy of ``weights`` with ``values`` where the mask says."""
    placed = weights.clone()
    placed[where] = values
    return placed
