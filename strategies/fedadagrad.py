"""FedAdagrad: the clients' mean change is the gradient of Adagrad at the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2. With Δ = Σ_k (n_k / Σ n) x_k - x,

    v ← v + Δ²
    x ← x + η Δ / (√v + τ)

There is no momentum (β_1 = 0), as in the paper's experiments. Flower's `FedAdagrad`
starts with v = 0 where the algorithm has v ≥ τ²; here it is τ². Departures: parameters
only are stepped; buffers such as BatchNorm's running statistics take the clients' mean.
The mean weights clients by their examples, as in the paper's experiments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.experiment import PositiveFloat, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.averaging import Updates, adaptive_step, mean_in_parts
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.fedavg import FedAvg


@dataclass(frozen=True)
class FedAdagradSettings(Settings):
    """How the server steps.

    Attributes
    ----------
    server_learning_rate
        η; the paper tunes it over 10^-3, 10^-2.5, ..., 10. The default is Flower's.
    adaptivity
        τ: the smaller, the more adaptive; the paper has 10^-5 to 10^-1, mostly 10^-3.
    """

    server_learning_rate: PositiveFloat = 0.1
    adaptivity: PositiveFloat = 0.001


@dataclass(frozen=True)
class FedAdagradState(Record):
    """The server's state."""

    weights: Tensor  # x, shape (num_weights,)
    second_moment: Tensor  # v, shape (num_parameters,)


class FedAdagrad(FedAvg):
    """The clients' mean change is the gradient of Adagrad at the server."""

    title = "FedAdagrad"
    source = "Reddi et al. 2021, Algorithm 2"
    server_state = "2"
    state_type = FedAdagradState

    settings: FedAdagradSettings

    def init(self, clients: Sequence[str], rng: RandomKey) -> FedAdagradState:
        num_parameters = self.task.model.num_parameters
        least = torch.full((num_parameters,), self.settings.adaptivity**2)
        return FedAdagradState(self.task.initial_weights, least)

    def aggregate(
        self, state: FedAdagradState, updates: Updates[ModelUpdate]
    ) -> FedAdagradState:
        num_parameters = self.task.model.num_parameters
        mean, buffers = mean_in_parts(updates, num_parameters)
        x = state.weights[:num_parameters].double()
        delta = mean - x
        v = state.second_moment.double() + delta**2
        eta, tau = self.settings.server_learning_rate, self.settings.adaptivity
        x = adaptive_step(x, delta, v, eta, tau)
        return FedAdagradState(torch.cat([x.float(), buffers]), v.float())
