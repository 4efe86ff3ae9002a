"""FedYogi: the clients' mean change is the gradient of Yogi at the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2. With Δ = Σ_k (n_k / Σ n) x_k - x,

    m ← β_1 m + (1 - β_1) Δ
    v ← v - (1 - β_2) Δ² sign(v - Δ²)
    x ← x + η m / (√v + τ)

Flower's `FedYogi` starts with v = 0 where the algorithm has v ≥ τ²; here it is τ².
Departures: parameters only are stepped; buffers such as BatchNorm's running statistics
take the clients' mean. The mean weights clients by their examples, as in the paper's
experiments.
"""

from dataclasses import dataclass

from torch import Tensor

from knnper.experiment import PositiveFloat
from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.server_optimizer import MomentSettings, with_moments
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg


@dataclass(frozen=True)
class FedYogiSettings(MomentSettings):
    """As `MomentSettings`, with a smaller step."""

    server_learning_rate: PositiveFloat = 0.01


def fedyogi(task: Task, settings: FedYogiSettings) -> Method:
    """Return FedYogi on ``task``."""
    return with_moments(fedavg(task, NoSettings()), task, settings, _second)


def _second(v: Tensor, squared_delta: Tensor, beta_2: float) -> Tensor:
    return v - (1 - beta_2) * squared_delta * (v - squared_delta).sign()


SPEC = MethodSpec(
    title="FedYogi",
    summary="The clients' mean change is the gradient of Yogi at the server.",
    source="Reddi et al. 2021, Algorithm 2",
    build=fedyogi,
    upload="1",
    download="1",
    client_state="0",
    server_state="3",
    unseen="the global model",
    reference_title="FedYogi",
    settings_type=FedYogiSettings,
    ends_with_global_model=True,
)
