"""q-FedAvg: clients with a higher loss count for more.

Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR
2020, Algorithm 2. With F_k(w) the loss of the received model on the training data of
client k, and w̄_k the model after its local training,

    Δw_k = L (w - w̄_k)
    Δ_k  = F_k(w)^q Δw_k
    h_k  = q F_k(w)^(q-1) |Δw_k|² + L F_k(w)^q
    w    ← w - Σ_k Δ_k / Σ_k h_k

The server keeps running sums only. As in Flower's `QFedAvg`, 1e-10 is added to F_k(w),
so that its powers are finite.

Departures from the paper:

- Clients of a round count the same, as in the algorithm. The algorithm samples clients
  by their examples; here every client is equally likely.
- Buffers such as BatchNorm's running statistics take the clients' mean, and do not
  enter the norm.
- With a learning-rate schedule, L follows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.seeding import RandomKey
from knnper.settings import NonNegativeFloat, PositiveFloat, Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.method import wrong_shape
from knnper.strategies.core.records import ModelPayload, ModelUpdate, Record
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class QFedAvgSettings(Settings):
    """The fairness of the model.

    Attributes
    ----------
    fairness
        q; 0 is the clients' mean, and a larger value makes the clients' losses more
        equal. The paper's grid is 0.001, 0.01, 0.1, 1, 2, 5, 10, 15.
    lipschitz_constant
        L, the Lipschitz constant of the gradient; null is 1 / η of the round, as in the
        paper.
    """

    fairness: NonNegativeFloat = 1.0
    lipschitz_constant: PositiveFloat | None = None


@dataclass(frozen=True)
class QFedAvgState(Record):
    """The server's state."""

    weights: Tensor  # w, shape (num_weights,)
    num_rounds: int  # rounds made


@dataclass(frozen=True)
class QFedAvgUpdate(ModelUpdate):
    """The update of a client."""

    # F_k(w), shape (). A tensor, so that a client fails if it is not finite.
    received_loss: Tensor


class QFedAvg(FedAvg):
    """Clients with a higher loss count for more."""

    title = "q-FedAvg"
    needs_sgd = "it takes the gradient to be the update divided by the rate of SGD"
    source = "Li et al. 2020, Algorithm 2"
    needs_metrics = True
    state_type = QFedAvgState
    update_type = QFedAvgUpdate

    settings: QFedAvgSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> QFedAvgState:
        return QFedAvgState(self.task.initial_weights, 0)

    @override
    def local_update(
        self, payload: ModelPayload, data: ClientData, rate: float, rng: RandomKey
    ) -> QFedAvgUpdate:
        loss = mean_loss(self.task, payload.weights, data.train)
        trained = self.train(payload.weights, data.train, rate, rng)
        num_examples = len(data.train)
        return QFedAvgUpdate(trained.weights, num_examples, trained.train_loss, loss)

    @override
    def aggregate(
        self, state: QFedAvgState, updates: Updates[QFedAvgUpdate]
    ) -> QFedAvgState:
        this_round, q = state.num_rounds + 1, self.settings.fairness
        rate = self.task.training.learning_rate_at(this_round)
        lipschitz = self.settings.lipschitz_constant or 1 / rate
        num_parameters = self.task.model.num_parameters
        parameters = state.weights[:num_parameters]
        mean_delta, mean_buffers, all_h = RunningMean(), RunningMean(), list[float]()
        largest, of_client = 0.0, ""
        for client, update in updates:
            loss = max(float(update.received_loss), 0.0)
            trained = update.weights[:num_parameters]
            delta, h = fair_terms(
                parameters, trained, q=q, lipschitz=lipschitz, loss=loss
            )
            mean_delta.add(delta, 1)
            mean_buffers.add(update.weights[num_parameters:], 1)
            all_h.append(h)
            largest, of_client = max((largest, of_client), (loss, client))
        mean_h = sum(all_h) / len(all_h)
        step = mean_delta.result_float64() / mean_h
        if not (math.isfinite(mean_h) and bool(torch.isfinite(step).all())):
            raise RunError(
                f"the step of q-FedAvg is not finite: the largest loss is {largest:g}, "
                f"of client {of_client!r}, and q = {q:g}; lower method.fairness or "
                "leave that client out"
            )
        stepped = (parameters.double() - step).float()
        weights = torch.cat([stepped, mean_buffers.result()])
        return QFedAvgState(weights, this_round)

    @override
    def update_problem(
        self, payload: ModelPayload, update: QFedAvgUpdate
    ) -> str | None:
        return wrong_shape(update, received_loss=())


def mean_loss(task: Task, weights: Tensor, examples: Examples) -> Tensor:
    """Return F_k(w), the mean of the model's losses in evaluation mode, shape ()."""
    return task.loss_sum(weights, examples) / max(len(examples), 1)


def fair_terms(
    parameters: Tensor, trained: Tensor, *, q: float, lipschitz: float, loss: float
) -> tuple[Tensor, float]:
    """Return Δ_k, float64 of shape (d,), and h_k of one client."""
    gradient = lipschitz * (parameters.double() - trained.double())
    positive = torch.tensor(loss, dtype=torch.float64) + 1e-10
    power = positive**q
    h = q * positive ** (q - 1) * gradient.square().sum() + lipschitz * power
    return power * gradient, float(h)
