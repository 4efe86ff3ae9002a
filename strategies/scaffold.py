"""SCAFFOLD: FedAvg with control variates that correct the drift of local steps.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, Algorithm 1 with option II. Local steps
and new control variates are

    y_i ← y_i - η_l (g_i(y_i) - c_i + c)
    c_i⁺ = c_i - c + (x - y_i) / (K η_l)

and the server's, over the set S of clients that replied out of N seen clients, are

    x ← x + η_g Σ_i p_i (y_i - x)
    c ← c + (|S| / N) Σ_i p_i (c_i⁺ - c_i)

with p_i = 1 / |S| as in the paper, or by size n_i / Σ n. Both means have the same
weights. Only then do the corrections sum to zero, and the rounds converge to the
optimum of Σ_i p_i f_i. By size, SCAFFOLD without corrections is FedAvg.

Departure from the paper: control variates cover parameters only. Buffers such as
BatchNorm's running statistics have no gradient and are averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from knnper.data.examples import ClientData
from knnper.errors import Problem
from knnper.experiment import Experiment
from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, Settings
from knnper.strategies.core.averaging import RunningMean, Updates
from knnper.strategies.core.method import wrong_shape
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.core.training import local_sgd
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class ScaffoldSettings(Settings):
    """The server's step towards the clients' mean.

    Attributes
    ----------
    global_learning_rate
        η_g, the step from the old model towards the clients' mean; useful from 0.1 to
        1. 1 takes the mean itself, as in FedAvg and in the paper's experiments.
    client_weights
        p_i in both means: equal for all clients (``equal``, as in the paper) or
        proportional to their training examples (``size``, as in FedAvg).
    """

    global_learning_rate: PositiveFloat = 1.0
    client_weights: Literal["equal", "size"] = "equal"


@dataclass(frozen=True)
class ScaffoldState(Record):
    """The server's state."""

    weights: Tensor  # x, shape (num_weights,)
    control: Tensor  # c, shape (num_parameters,)
    num_clients: int  # N, all seen clients, including those that never replied


@dataclass(frozen=True)
class ScaffoldPayload(Record):
    """The payload of a client."""

    weights: Tensor  # x, shape (num_weights,)
    control: Tensor  # c, shape (num_parameters,)


@dataclass(frozen=True)
class ScaffoldClientState(Record):
    """The state that a client keeps between rounds."""

    control: Tensor  # c_i, shape (num_parameters,); zero before its first round


@dataclass(frozen=True)
class ScaffoldUpdate(ModelUpdate):
    """The update of a client."""

    control_change: Tensor  # c_i⁺ - c_i, shape (num_parameters,)


class Scaffold(FedAvg):
    """One global model; control variates correct the clients' drift."""

    title = "SCAFFOLD"
    needs_sgd = "its control variates are sums of steps of SGD divided by its rate"
    source = "Karimireddy et al. 2020, Algorithm 1, option II"
    upload = "2"
    download = "2"
    client_state = "1"
    server_state = "2"
    state_type = ScaffoldState
    payload_type = ScaffoldPayload
    update_type = ScaffoldUpdate
    client_state_type = ScaffoldClientState

    settings: ScaffoldSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> ScaffoldState:
        control = torch.zeros(self.task.model.num_parameters)
        return ScaffoldState(self.task.initial_weights, control, len(clients))

    @override
    def broadcast(
        self, state: ScaffoldState, client_id: str, rng: RandomKey
    ) -> ScaffoldPayload:
        return ScaffoldPayload(state.weights, state.control)

    @override
    def client_update(
        self,
        payload: ScaffoldPayload,
        client_state: ScaffoldClientState | None,
        data: ClientData,
        server_round: int,
        rng: RandomKey,
    ) -> tuple[ScaffoldClientState, ScaffoldUpdate]:
        rate = self.task.training.learning_rate_at(server_round)
        zero = torch.zeros(self.task.model.num_parameters)
        old = zero if client_state is None else client_state.control
        correction = (payload.control - old).to(self.task.model.device)

        def correct(gradient: Tensor, parameters: Tensor) -> None:
            gradient.add_(correction)

        trained = local_sgd(
            self.task, payload.weights, data.train, rate, rng, gradient_hook=correct
        )
        change = zero
        if trained.num_steps > 0:
            moved = (payload.weights - trained.weights)[: len(zero)]
            change = moved / (trained.num_steps * rate) - payload.control
        update = ScaffoldUpdate(
            trained.weights, len(data.train), trained.train_loss, change
        )
        return ScaffoldClientState(old + change), update

    @override
    def aggregate(
        self, state: ScaffoldState, updates: Updates[ScaffoldUpdate]
    ) -> ScaffoldState:
        models, changes, num_replies = RunningMean(), RunningMean(), 0
        for _, update in updates:
            weight = 1
            if self.settings.client_weights == "size":
                weight = update.num_examples
            models.add(update.weights, weight)
            changes.add(update.control_change, weight)
            num_replies += 1
        weights = models.result_float64()
        # Buffers take the mean; a running variance must not be extrapolated.
        parameters = slice(0, len(state.control))
        rate = self.settings.global_learning_rate
        decayed = (1 - rate) * state.weights[parameters].double()
        weights[parameters] = decayed + rate * weights[parameters]
        fraction = num_replies / state.num_clients
        control = state.control.double() + fraction * changes.result_float64()
        return ScaffoldState(weights.float(), control.float(), state.num_clients)

    @override
    def update_problem(
        self, payload: ScaffoldPayload, update: ScaffoldUpdate
    ) -> str | None:
        return wrong_shape(update, control_change=(self.task.model.num_parameters,))

    @staticmethod
    @override
    def check(settings: ScaffoldSettings, experiment: Experiment) -> Sequence[Problem]:
        momentum = experiment.training.momentum
        message = (
            f"found {momentum}, expected 0 with scaffold: its control variates are "
            "estimated as (x - y) / (K η), the mean gradient of plain SGD only; "
            "remove the setting or choose another method"
        )
        return [Problem("training.momentum", message)] if momentum else ()
