"""FedYogi: the clients' mean change is the gradient of Yogi at the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2. With Δ = Σ_k (n_k / Σ n) x_k - x,

    m ← β_1 m + (1 - β_1) Δ
    v ← v - (1 - β_2) Δ² sign(v - Δ²)
    x ← x + η m / (√v + τ)

The server half is Flower's `FedYogi`. It is given the mean of the clients' models, as
one reply: server memory does not grow with the number of clients.

Flower starts with v = 0 where the algorithm has v ≥ τ²; here it is τ². Departures:
parameters only are stepped; buffers such as BatchNorm's running statistics take the
clients' mean. The mean weights clients by their examples, as in the paper's
experiments.
"""

from dataclasses import dataclass

from knnper.experiment import PositiveFloat
from knnper.strategies.core.method import Method, MethodSpec, NoSettings
from knnper.strategies.core.server_optimizer import MomentSettings, with_moments, yogi
from knnper.strategies.core.task import Task
from knnper.strategies.fedavg import fedavg


@dataclass(frozen=True)
class FedYogiSettings(MomentSettings):
    """As `MomentSettings`, with a smaller step."""

    server_learning_rate: PositiveFloat = 0.01


def fedyogi(task: Task, settings: FedYogiSettings) -> Method:
    """Return FedYogi on ``task``."""
    return with_moments(fedavg(task, NoSettings()), task, settings, yogi)


SPEC = MethodSpec(
    title="FedYogi",
    summary="The clients' mean change is the gradient of Yogi at the server.",
    source="Reddi et al. 2021, Algorithm 2; Flower's FedYogi",
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
