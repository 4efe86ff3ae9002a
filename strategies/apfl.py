"""APFL: a personal model beside the global one, and a mixture of their weights.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1; a
baseline of Marfoq et al. 2022 (section 5). A client trains w, its copy of the global
model, and v, its personal model, on the same mini-batches ξ:

    v̄ = α v + (1 - α) w
    v ← v - η α ∇f(v̄; ξ)
    w ← w - η ∇f(w; ξ)

The server averages the w, as in FedAvg. v stays with the client, which serves v̄. With
an adaptive α each step also makes α ← α - η ⟨v - w, ∇f(v̄; ξ)⟩, clipped to [0, 1].

With α = 0 clients serve FedAvg's model; with α = 1 they serve the model of `local` for
the same mini-batches. w is FedAvg's in every bit, for any α. A seen client serves the v
of its last round, which was not trained on its validation split; an unseen client
trains v on both splits.

Departures from the paper:

- v starts from the global model of the client's first round, not from the initial one.
- The mean of the w weights clients by their examples; the paper weights them equally.
- Buffers such as BatchNorm's running statistics have no gradient. The buffers of v
  follow the passes at v̄, and v̄ is served with them; with α = 0 it is served with w's.
- α adapts in each step, as in the paper's formula; the authors' code adapts it once a
  round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.seeding import RandomKey
from knnper.settings import PositiveInt, Settings, UnitInterval
from knnper.strategies.core.final_training import on_both_splits
from knnper.strategies.core.method import Method
from knnper.strategies.core.optimizers import Sgd
from knnper.strategies.core.predictors import ModelPredictor, Predictor
from knnper.strategies.core.records import ModelPayload, ModelUpdate, Record
from knnper.strategies.core.task import Task
from knnper.strategies.core.training import Batch, LocalModel, local_sgd


@dataclass(frozen=True)
class ApflSettings(Settings):
    """The personal share of a client's model.

    Attributes
    ----------
    mixing_weight
        α, the share of the personal model; the grid of Marfoq et al. 2022 is 0.1, 0.3,
        0.5, 0.7, 0.9. 0 is FedAvg, 1 is Local. With ``adaptive`` it is the start.
    adaptive
        Whether each client learns an α of its own.
    unseen_epochs
        Passes over its data in which an unseen client trains v and, with ``adaptive``,
        α; w is fixed.
    """

    mixing_weight: UnitInterval = 0.5
    adaptive: bool = False
    unseen_epochs: PositiveInt = 10


@dataclass(frozen=True)
class ApflClientState(Record):
    """The state that a client keeps between rounds."""

    personal: Tensor  # v, shape (num_weights,)
    mixing_weight: float  # α


class PersonalModel:
    """v and α during local training, on the mini-batches of the loop that trains w."""

    def __init__(
        self, task: Task, start: ApflClientState, learning_rate: float, adaptive: bool
    ) -> None:
        weights = start.personal.to(task.model.device, copy=True)
        self._parameters = weights[: task.model.num_parameters]
        self._parts = task.model.parts(self._parameters)
        self._buffers = weights[task.model.num_parameters :]
        self._weights = weights
        self._mixing_weight = start.mixing_weight
        self._optimizer = Sgd(task, self._parts, learning_rate)
        self._learning_rate = learning_rate
        self._adaptive = adaptive

    def step(self, model: LocalModel, batch: Batch) -> Tensor:
        """Train v and α on ``batch``; return the loss at v̄ before the step."""
        personal, share = self._parameters, self._mixing_weight
        difference = personal - model.parameters
        with model.aside(self._buffers):
            loss = model.backward(batch, at=mixed(model.parameters, personal, share))
        if self._adaptive:
            slope = float(difference @ model.gradient)
            self._mixing_weight = min(
                max(share - self._learning_rate * slope, 0.0), 1.0
            )
        slopes = model.task.model.parts(share * model.gradient)
        for part, slope_of_part in zip(self._parts, slopes, strict=True):
            part.grad = slope_of_part
        self._optimizer.step()
        return loss

    def state(self) -> ApflClientState:
        """Return the current v and α."""
        return ApflClientState(self._weights.to("cpu", copy=True), self._mixing_weight)


class Apfl(Method):
    """Each client mixes the weights of the global model and of a personal model."""

    title = "APFL"
    needs_sgd = "its mixing weight follows the gradient of a step of SGD"
    source = "Deng et al. 2020, Algorithm 1; Marfoq et al. 2022, section 5"
    client_state = "1"
    unseen = "a model of its own, trained beside the fixed global one and mixed with it"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = "APFL (global model)"
    ends_with_global_model = True
    client_state_type = ApflClientState

    settings: ApflSettings

    @override
    def client_update(
        self,
        payload: ModelPayload,
        client_state: ApflClientState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[ApflClientState, ModelUpdate]:
        rate = self.task.training.learning_rate_at(server_round)
        start = client_state or self._first_state(payload)
        personal = PersonalModel(self.task, start, rate, self.settings.adaptive)

        def step(model: LocalModel) -> Tensor:
            batch = model.next_batch()
            personal.step(model, batch)
            loss = model.backward(batch)
            model.step()
            return loss

        trained = local_sgd(
            self.task, payload.weights, data.train, rate, rng, local_step=step
        )
        return personal.state(), trained.update(len(data.train))

    @override
    def personalize(
        self,
        payload: ModelPayload,
        client_state: ApflClientState | None,
        data: ClientData,
        rng: RandomKey,
    ) -> Predictor:
        if data.num_examples == 0:
            return ModelPredictor(self.task, payload.weights)

        def beside(examples: Examples) -> ModelPredictor:
            state = self._unseen_client(payload, examples, rng)
            return self._served(payload.weights, state)

        if client_state is None:
            return on_both_splits(data, beside)
        return self._served(payload.weights, client_state)

    def _served(self, shared: Tensor, state: ApflClientState) -> ModelPredictor:
        """Return the predictor of v̄, with v's buffers unless α is 0."""
        share, num_parameters = state.mixing_weight, self.task.model.num_parameters
        weights = mixed(shared, state.personal, share)
        if share > 0:
            weights[num_parameters:] = state.personal[num_parameters:]
        return ModelPredictor(self.task, weights, {"mixing_weight": share})

    def _first_state(self, payload: ModelPayload) -> ApflClientState:
        return ApflClientState(payload.weights, float(self.settings.mixing_weight))

    def _unseen_client(
        self, payload: ModelPayload, examples: Examples, rng: RandomKey
    ) -> ApflClientState:
        """Return the state of a client that trains v beside a fixed w."""
        rate = self.task.first_rate
        start = self._first_state(payload)
        personal = PersonalModel(self.task, start, rate, self.settings.adaptive)
        local_sgd(
            self.task,
            payload.weights,
            examples,
            rate,
            rng,
            num_epochs=self.settings.unseen_epochs,
            local_step=lambda model: personal.step(model, model.next_batch()),
        )
        return personal.state()


def mixed(shared: Tensor, personal: Tensor, mixing_weight: float) -> Tensor:
    """Return v̄ = α v + (1 - α) w: exactly w for α = 0, v for α = 1, w if they agree."""
    return torch.lerp(shared, personal, mixing_weight)
