"""FedAdam, FedYogi and FedAdagrad: adaptive steps of the server.

The clients' mean change serves as the gradient of an adaptive optimizer.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2. With Δ = Σ_k (n_k / Σ n) x_k - x,

    m ← β_1 m + (1 - β_1) Δ                  FedAdagrad: m = Δ
    v ← β_2 v + (1 - β_2) Δ²                 FedAdam
    v ← v - (1 - β_2) Δ² sign(v - Δ²)        FedYogi
    v ← v + Δ²                               FedAdagrad
    x ← x + η m / (√v + τ)

FedAdagrad has no momentum (β_1 = 0), as in the paper's experiments. The mean weights
clients by their examples, as there.

Departure from the paper: only parameters make these steps. Buffers such as BatchNorm's
running statistics take the clients' mean.

Flower's methods of these names differ: they start with v = 0, where the paper requires
v ≥ τ² (here v = τ²), and its `FedAdam` multiplies η by Adam's bias correction, of the
next round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from knnper.seeding import RandomKey
from knnper.settings import PositiveFloat, ProperFraction, Settings
from knnper.strategies.core.averaging import Updates, mean_in_parts
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class FedAdamSettings(Settings):
    """The server's optimizer with two moments.

    Attributes
    ----------
    server_learning_rate
        η; the paper tunes it over 10^-3, 10^-2.5, ..., 10. The default is Flower's.
    first_moment_decay
        β_1, [0, 1); 0.9 in the paper.
    second_moment_decay
        β_2, [0, 1); 0.99 in the paper.
    adaptivity
        τ; a smaller value is more adaptive. 10^-5 to 10^-1 in the paper, mostly 10^-3.
    """

    server_learning_rate: PositiveFloat = 0.1
    first_moment_decay: ProperFraction = 0.9
    second_moment_decay: ProperFraction = 0.99
    adaptivity: PositiveFloat = 0.001


@dataclass(frozen=True)
class FedYogiSettings(FedAdamSettings):
    """The server's optimizer with two moments, with a smaller default step."""

    server_learning_rate: PositiveFloat = 0.01


@dataclass(frozen=True)
class FedAdagradSettings(Settings):
    """The server's optimizer.

    Attributes
    ----------
    server_learning_rate
        η; the paper tunes it over 10^-3, 10^-2.5, ..., 10. The default is Flower's.
    adaptivity
        τ; a smaller value is more adaptive. 10^-5 to 10^-1 in the paper, mostly 10^-3.
    """

    server_learning_rate: PositiveFloat = 0.1
    adaptivity: PositiveFloat = 0.001


@dataclass(frozen=True)
class MomentState(Record):
    """The state of a server with two moments."""

    weights: Tensor  # x, shape (num_weights,)
    momentum: Tensor  # m, shape (num_parameters,)
    second_moment: Tensor  # v, shape (num_parameters,)


@dataclass(frozen=True)
class FedAdagradState(Record):
    """The state of a server without momentum."""

    weights: Tensor  # x, shape (num_weights,)
    second_moment: Tensor  # v, shape (num_parameters,)


def _step(
    x: Tensor, m: Tensor, v: Tensor, settings: FedAdagradSettings | FedAdamSettings
) -> Tensor:
    """Return x + η m / (√v + τ), float32."""
    eta, tau = settings.server_learning_rate, settings.adaptivity
    return (x + eta * m / (v.sqrt() + tau)).float()


class FedAdam(FedAvg):
    """The clients' mean change is the gradient of Adam at the server."""

    title = "FedAdam"
    source = "Reddi et al. 2021, Algorithm 2"
    server_state = "3"
    takes_mean = True
    state_type = MomentState

    settings: FedAdamSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> MomentState:
        momentum = torch.zeros(self.task.model.num_parameters)
        # The smallest v that Algorithm 2 allows at the start.
        second_moment = torch.full_like(momentum, self.settings.adaptivity**2)
        return MomentState(self.task.initial_weights, momentum, second_moment)

    @override
    def aggregate(
        self, state: MomentState, updates: Updates[ModelUpdate]
    ) -> MomentState:
        num_parameters, beta_1 = len(state.momentum), self.settings.first_moment_decay
        mean, buffers = mean_in_parts(updates, num_parameters)
        x = state.weights[:num_parameters].double()
        delta = mean - x
        m = beta_1 * state.momentum.double() + (1 - beta_1) * delta
        v = self.next_second(state.second_moment.double(), delta**2)
        x = _step(x, m, v, self.settings)
        return MomentState(torch.cat([x, buffers]), m.float(), v.float())

    def next_second(self, v: Tensor, squared_delta: Tensor) -> Tensor:
        """Return v of the next round, float64 of shape (num_parameters,)."""
        beta_2 = self.settings.second_moment_decay
        return beta_2 * v + (1 - beta_2) * squared_delta


class FedYogi(FedAdam):
    """The clients' mean change is the gradient of Yogi at the server."""

    name = "fedyogi"
    title = "FedYogi"
    source = "Reddi et al. 2021, Algorithm 2"

    settings: FedYogiSettings

    @override
    def next_second(self, v: Tensor, squared_delta: Tensor) -> Tensor:
        beta_2 = self.settings.second_moment_decay
        return v - (1 - beta_2) * squared_delta * (v - squared_delta).sign()


class FedAdagrad(FedAvg):
    """The clients' mean change is the gradient of Adagrad at the server."""

    name = "fedadagrad"
    title = "FedAdagrad"
    source = "Reddi et al. 2021, Algorithm 2"
    server_state = "2"
    takes_mean = True
    state_type = FedAdagradState

    settings: FedAdagradSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> FedAdagradState:
        num_parameters = self.task.model.num_parameters
        least = torch.full((num_parameters,), self.settings.adaptivity**2)
        return FedAdagradState(self.task.initial_weights, least)

    @override
    def aggregate(
        self, state: FedAdagradState, updates: Updates[ModelUpdate]
    ) -> FedAdagradState:
        num_parameters = len(state.second_moment)
        mean, buffers = mean_in_parts(updates, num_parameters)
        x = state.weights[:num_parameters].double()
        delta = mean - x
        v = state.second_moment.double() + delta**2
        x = _step(x, delta, v, self.settings)
        return FedAdagradState(torch.cat([x, buffers]), v.float())
