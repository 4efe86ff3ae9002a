"""q-FedAvg: clients on which the model does badly count for more.

Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR
2020, Algorithm 2. With F_k(w) the loss of the model that client k received, on its
training data, and w̄_k what local training makes of it,

    Δw_k = L (w - w̄_k)
    Δ_k  = F_k(w)^q Δw_k
    h_k  = q F_k(w)^(q-1) |Δw_k|² + L F_k(w)^q
    w    ← w - Σ_k Δ_k / Σ_k h_k

The sums are folded: server memory does not grow with the number of clients. As in
Flower's `QFedAvg`, 1e-10 is added to F_k(w), so that its powers are finite.

Departures: clients of a round count the same, as in the algorithm, which draws them by
their examples instead; here every client is as likely to be drawn. Buffers such as
BatchNorm's running statistics take the clients' mean, and do not enter the norm. With
a learning-rate schedule, L follows it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnper.data.examples import ClientData, Examples
from knnper.errors import RunError
from knnper.experiment import NonNegativeFloat, PositiveFloat, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import RunningMean
from knnper.strategies.core.method import Method, MethodSpec, NoSettings, of_shapes
from knnper.strategies.core.records import ModelPayload, NoState, Record
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg


@dataclass(frozen=True)
class QFedAvgSettings(Settings):
    """How fair the model is to be.

    Attributes
    ----------
    fairness
        q: 0 is the clients' mean, the larger, the more alike are the clients' losses.
        The paper's grid is 0.001, 0.01, 0.1, 1, 2, 5, 10, 15.
    lipschitz_constant
        L, of the gradient; null is 1 / η of the round, as in the paper.
    """

    fairness: NonNegativeFloat = 1.0
    lipschitz_constant: PositiveFloat | None = None


@dataclass(frozen=True)
class QFedAvgState(Record):
    """The server's state.

    Attributes
    ----------
    weights
        w, shape (num_weights,).
    num_rounds
        Rounds that were made.
    """

    weights: Tensor
    num_rounds: int


@dataclass(frozen=True)
class QFedAvgUpdate(Record):
    """What a client sends back.

    Attributes
    ----------
    weights
        w̄_k, shape (num_weights,).
    received_loss
        F_k(w), shape (): a tensor, since the server passes over a client whose tensors
        are not finite.
    num_examples, train_loss
        See `Update`.
    """

    weights: Tensor
    received_loss: Tensor
    num_examples: int
    train_loss: float


def qfedavg(task: Task, settings: QFedAvgSettings) -> Method:
    """Return q-FedAvg on ``task``."""
    base = fedavg(task, NoSettings())

    def init(clients: Sequence[str], rng: RandomKey) -> QFedAvgState:
        return QFedAvgState(task.initial_weights, 0)

    def client_update(
        payload: ModelPayload,
        client_state: NoState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[NoState, QFedAvgUpdate]:
        loss = mean_loss(task, payload.weights, data.train)
        memory, trained = base.client_update(
            payload, client_state, data, server_round, rng
        )
        return memory, QFedAvgUpdate(
            trained.weights, loss, trained.num_examples, trained.train_loss
        )

    def aggregate(
        state: QFedAvgState, updates: Iterable[tuple[str, QFedAvgUpdate]]
    ) -> QFedAvgState:
        this_round = state.num_rounds + 1
        rate = task.training.learning_rate_at(this_round)
        lipschitz = settings.lipschitz_constant or 1 / rate
        num_parameters = task.model.num_parameters
        sums = _FairSums(state.weights[:num_parameters], settings.fairness, lipschitz)
        for client, update in updates:
            sums.add(client, update)
        return QFedAvgState(sums.next_weights(), this_round)

    return replace(
        base,
        init=init,
        client_update=client_update,
        aggregate=aggregate,
        state_type=QFedAvgState,
        update_type=QFedAvgUpdate,
        update_problem=of_shapes(received_loss=()),
    )


def mean_loss(task: Task, weights: Tensor, examples: Examples) -> Tensor:
    """Return F_k(w), the mean of the model's losses in evaluation mode, shape ()."""
    return task.loss_sum(weights, examples) / max(len(examples), 1)


def fair_terms(
    parameters: Tensor, trained: Tensor, *, q: float, lipschitz: float, loss: float
) -> tuple[Tensor, float]:
    """Return Δ_k, float64 of shape (d,), and h_k of one client.

    Parameters
    ----------
    parameters, trained
        w and w̄_k, each of shape (d,).
    q, lipschitz, loss
        q, L and F_k(w). Powers that overflow are infinite.
    """
    gradient = lipschitz * (parameters.double() - trained.double())
    positive = torch.tensor(loss, dtype=torch.float64) + 1e-10
    power = positive**q
    h = q * positive ** (q - 1) * gradient.square().sum() + lipschitz * power
    return power * gradient, float(h)


class _FairSums:
    """The sums over the clients in which a round ends, and nothing else of them."""

    def __init__(self, parameters: Tensor, fairness: float, lipschitz: float) -> None:
        self._parameters = parameters
        self._fairness = fairness
        self._lipschitz = lipschitz
        self._mean_delta = RunningMean()
        self._mean_buffers = RunningMean()
        self._h: list[float] = []
        self._largest_loss = (0.0, "nobody")

    def add(self, client: str, update: QFedAvgUpdate) -> None:
        """Add one client's Δ_k and h_k; a loss below 0 is none."""
        num_parameters = len(self._parameters)
        loss = max(float(update.received_loss), 0.0)
        delta, h = fair_terms(
            self._parameters,
            update.weights[:num_parameters],
            q=self._fairness,
            lipschitz=self._lipschitz,
            loss=loss,
        )
        self._mean_delta.add(delta, 1)
        self._mean_buffers.add(update.weights[num_parameters:], 1)
        self._h.append(h)
        self._largest_loss = max(self._largest_loss, (loss, client))

    def next_weights(self) -> Tensor:
        """Return w - Σ Δ_k / Σ h_k, and the mean of the buffers.

        Raises
        ------
        RunError
            If losses to the power of q are beyond what can be computed with.
        """
        mean_h = sum(self._h) / len(self._h)
        step = self._mean_delta.result_float64() / mean_h
        if not (math.isfinite(mean_h) and bool(torch.isfinite(step).all())):
            loss, client = self._largest_loss
            raise RunError(
                f"the step of q-FedAvg is not finite: the largest loss is {loss:g}, "
                f"of client {client!r}, and q = {self._fairness:g}; lower "
                "method.fairness or leave that client out"
            )
        parameters = (self._parameters.double() - step).float()
        return torch.cat([parameters, self._mean_buffers.result()])


SPEC = MethodSpec(
    title="q-FedAvg",
    summary="Clients on which the model does badly count for more.",
    source="Li et al. 2020, Algorithm 2",
    build=qfedavg,
    upload="1",
    download="1",
    client_state="0",
    server_state="1",
    unseen="the global model",
    reference_title="q-FedAvg",
    settings_type=QFedAvgSettings,
    ends_with_global_model=True,
    needs_metrics=True,
)
