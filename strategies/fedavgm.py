"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", 2019, section 4.3. With Δ = w - Σ_k (n_k / Σ n) w_k,

    v ← β v + Δ
    w ← w - η v

Departures from the paper:

- Only parameters make this step. Buffers such as BatchNorm's running statistics take
  the clients' mean.
- η is Flower's addition; it is 1 in the paper.
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
class FedAvgMSettings(Settings):
    """The server's step.

    Attributes
    ----------
    server_learning_rate
        η; useful from 0.1 to 2, 1 in the paper.
    server_momentum
        β, [0, 1); 0 is no momentum. 0.9 is the paper's first choice, and its grid goes
        up to 0.997.
    """

    server_learning_rate: PositiveFloat = 1.0
    server_momentum: ProperFraction = 0.9


@dataclass(frozen=True)
class FedAvgMState(Record):
    """The server's state."""

    weights: Tensor  # w, shape (num_weights,)
    momentum: Tensor  # v, shape (num_parameters,)


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server."""

    title = "FedAvgM"
    source = "Hsu et al. 2019, section 4.3"
    server_state = "2"
    takes_mean = True
    state_type = FedAvgMState

    settings: FedAvgMSettings

    @override
    def init(self, clients: Sequence[str], rng: RandomKey) -> FedAvgMState:
        momentum = torch.zeros(self.task.model.num_parameters)
        return FedAvgMState(self.task.initial_weights, momentum)

    @override
    def aggregate(
        self, state: FedAvgMState, updates: Updates[ModelUpdate]
    ) -> FedAvgMState:
        num_parameters = self.task.model.num_parameters
        mean, buffers = mean_in_parts(updates, num_parameters)
        eta, old = self.settings.server_learning_rate, state.momentum.double()
        decayed = self.settings.server_momentum * old
        delta = state.weights[:num_parameters].double() - mean
        # This is w - η v, written so that it is exactly the mean for η = 1 and β = 0.
        w = mean + (1 - eta) * delta - eta * decayed
        return FedAvgMState(torch.cat([w.float(), buffers]), (decayed + delta).float())
