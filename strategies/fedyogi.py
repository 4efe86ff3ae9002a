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
from knnper.strategies.fedadam import FedAdam, FedAdamSettings


@dataclass(frozen=True)
class FedYogiSettings(FedAdamSettings):
    """As `FedAdamSettings`, with a smaller step."""

    server_learning_rate: PositiveFloat = 0.01


class FedYogi(FedAdam):
    """The clients' mean change is the gradient of Yogi at the server."""

    title = "FedYogi"
    source = "Reddi et al. 2021, Algorithm 2"

    settings: FedYogiSettings

    def next_second(self, v: Tensor, squared_delta: Tensor) -> Tensor:
        beta_2 = self.settings.second_moment_decay
        return v - (1 - beta_2) * squared_delta * (v - squared_delta).sign()
