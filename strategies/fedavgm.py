"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", 2019, section 4.3. With Δ = w - Σ_k (n_k / Σ n) w_k,

    v ← β v + Δ
    w ← w - η v

Departures: parameters only are stepped; buffers such as BatchNorm's running statistics
take the clients' mean. η is Flower's addition: the paper has 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knnper.experiment import PositiveFloat, ProperFraction, Settings
from knnper.seeding import RandomKey
from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.records import ModelUpdate, Record
from knnper.strategies.core.server_optimizer import mean_in_parts
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg


@dataclass(frozen=True)
class FedAvgMSettings(Settings):
    """How the server steps.

    Attributes
    ----------
    server_learning_rate
        η. 1 in the paper.
    server_momentum
        β, [0, 1): 0 is none, 0.9 the paper's first choice; its grid goes to 0.997.
    """

    server_learning_rate: PositiveFloat = 1.0
    server_momentum: ProperFraction = 0.9


@dataclass(frozen=True)
class FedAvgMState(Record):
    """The server's state.

    Attributes
    ----------
    weights
        w, shape (num_weights,).
    momentum
        v, shape (num_parameters,).
    """

    weights: Tensor
    momentum: Tensor


def fedavgm(task: Task, settings: FedAvgMSettings) -> Method:
    """Return FedAvgM on ``task``."""
    num_parameters = task.model.num_parameters

    def init(clients: Sequence[str], rng: RandomKey) -> FedAvgMState:
        return FedAvgMState(task.initial_weights, torch.zeros(num_parameters))

    def aggregate(
        state: FedAvgMState, updates: Iterable[tuple[str, ModelUpdate]]
    ) -> FedAvgMState:
        mean, buffers = mean_in_parts(updates, num_parameters)
        eta, old = settings.server_learning_rate, state.momentum.double()
        kept = settings.server_momentum * old
        delta = state.weights[:num_parameters].double() - mean
        # w - η v, so that it is the mean to the bit where η = 1 and β = 0.
        w = mean + (1 - eta) * delta - eta * kept
        return FedAvgMState(torch.cat([w.float(), buffers]), (kept + delta).float())

    base = fedavg(task, NoSettings())
    return replace(base, init=init, aggregate=aggregate, state_type=FedAvgMState)


SPEC = MethodSpec(
    title="FedAvgM",
    summary="FedAvg with momentum at the server.",
    source="Hsu et al. 2019, section 4.3",
    build=fedavgm,
    upload="1",
    download="1",
    client_state="0",
    server_state="2",
    unseen="the global model",
    reference_title="FedAvgM",
    settings_type=FedAvgMSettings,
    ends_with_global_model=True,
)
