"""FedAdam: the clients' mean change is the gradient of Adam at the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2. With Δ = Σ_k (n_k / Σ n) x_k - x,

    m ← β_1 m + (1 - β_1) Δ
    v ← β_2 v + (1 - β_2) Δ²
    x ← x + η m / (√v + τ)

Flower's `FedAdam` differs from the algorithm in two ways: it starts with v = 0 where
the paper has v ≥ τ², and multiplies η with Adam's bias correction (for the round after
the present one). Departures: parameters only are stepped; buffers such as BatchNorm's
running statistics take the clients' mean. The mean weights clients by their examples,
as in the paper's experiments.
"""

from dataclasses import dataclass

from torch import Tensor

from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.server_optimizer import MomentSettings, with_moments
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg


@dataclass(frozen=True)
class FedAdamSettings(MomentSettings):
    """As `MomentSettings`."""


def fedadam(task: Task, settings: FedAdamSettings) -> Method:
    """Return FedAdam on ``task``."""
    return with_moments(fedavg(task, NoSettings()), task, settings, _second)


def _second(v: Tensor, squared_delta: Tensor, beta_2: float) -> Tensor:
    return beta_2 * v + (1 - beta_2) * squared_delta


SPEC = MethodSpec(
    title="FedAdam",
    summary="The clients' mean change is the gradient of Adam at the server.",
    source="Reddi et al. 2021, Algorithm 2",
    build=fedadam,
    upload="1",
    download="1",
    client_state="0",
    server_state="3",
    unseen="the global model",
    reference_title="FedAdam",
    settings_type=FedAdamSettings,
    ends_with_global_model=True,
)
