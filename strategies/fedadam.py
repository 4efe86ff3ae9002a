"""FedAdam: the clients' mean change is the gradient of Adam at the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2. With Δ = Σ_k (n_k / Σ n) x_k - x,

    m ← β_1 m + (1 - β_1) Δ
    v ← β_2 v + (1 - β_2) Δ²
    x ← x + η m / (√v + τ)

The server half is Flower's `FedAdam`. It is given the mean of the clients' models, as
one reply: server memory does not grow with the number of clients.

Flower's differs from the algorithm in two ways that are undone here: it starts with
v = 0 where the paper has v ≥ τ², and multiplies η with Adam's bias correction (for the
round after the present one). Departures: parameters only are stepped; buffers such as
BatchNorm's running statistics take the clients' mean. The mean weights clients by
their examples, as in the paper's experiments.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from knnper.config.ranges import PositiveFloat, ProperFraction
from knnper.config.sections import Settings
from knnper.config.seeding import RandomKey
from strategies.core.flower_aggregation import adam
from strategies.core.method import Method, MethodSpec, NoSettings
from strategies.core.records import ModelUpdate
from strategies.core.server_optimizer import MomentState, next_moments, no_moments
from strategies.core.task import Task
from strategies.fedavg import fedavg


@dataclass(frozen=True)
class FedAdamSettings(Settings):
    """How the server steps.

    Attributes
    ----------
    server_learning_rate
        η; the paper tunes it over 10^-3, 10^-2.5, ..., 10. The default is Flower's.
    first_moment_decay
        β_1, [0, 1). 0.9 in the paper.
    second_moment_decay
        β_2, [0, 1). 0.99 in the paper.
    adaptivity
        τ: the smaller, the more adaptive; the paper has 10^-5 to 10^-1, mostly 10^-3.
    """

    server_learning_rate: PositiveFloat = 0.1
    first_moment_decay: ProperFraction = 0.9
    second_moment_decay: ProperFraction = 0.99
    adaptivity: PositiveFloat = 0.001


def fedadam(task: Task, settings: FedAdamSettings) -> Method:
    """Return FedAdam on ``task``."""

    def init(clients: Sequence[str], rng: RandomKey) -> MomentState:
        return no_moments(task, settings.adaptivity)

    def aggregate(
        state: MomentState, updates: Iterable[tuple[str, ModelUpdate]]
    ) -> MomentState:
        step = adam(
            eta=settings.server_learning_rate,
            beta_1=settings.first_moment_decay,
            beta_2=settings.second_moment_decay,
            tau=settings.adaptivity,
        )
        return next_moments(step, state, updates)

    base = fedavg(task, NoSettings())
    return replace(base, init=init, aggregate=aggregate, state_type=MomentState)


SPEC = MethodSpec(
    title="FedAdam",
    summary="The clients' mean change is the gradient of Adam at the server.",
    source="Reddi et al. 2021, Algorithm 2; Flower's FedAdam",
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
