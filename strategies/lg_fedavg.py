"""LG-FedAvg: the first layers of the model stay with each client.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act
Globally: Federated Learning with Local and Global Representations", 2020, Algorithm 1;
a baseline of fedbasis-pflbed.txt (Table 6). A client m trains its local representation
ℓ_m(·; θ_m^ℓ) and the global model g(·; θ^g) on top of it together,

    (θ_m^ℓ, θ_m^g) ← SGD from (θ_m^ℓ of its last round, θ^g of the server)

and sends θ_m^g only, of which the server takes the mean weighted by examples.

Departures: the supervised local loss only, without the paper's auxiliary and fair
representations. The paper sends inputs of unknown devices through all trained local
models; here they never leave their clients, and a newcomer trains one of its own under
the global model.
"""

from dataclasses import dataclass

from torch import Tensor

from knnper.experiment import NonNegativeInt, PositiveInt, Settings
from knnper.strategies.core.method import Method, MethodSpec
from knnper.strategies.core.sharing import Sharing, partly_shared
from knnper.strategies.core.task import Task, first_layers, layers_left


@dataclass(frozen=True)
class LGFedAvgSettings(Settings):
    """Which part is local.

    Attributes
    ----------
    num_local_layers
        Layers of ℓ, counted from the start: convolutions or linear layers, each with
        the normalisation behind it. Null is all but the head; 0 is FedAvg.
    unseen_epochs
        Passes over its data in which a client that was never drawn trains them.
    """

    num_local_layers: NonNegativeInt | None = None
    unseen_epochs: PositiveInt = 10


def lg_fedavg(task: Task, settings: LGFedAvgSettings) -> Method:
    """Return LG-FedAvg on ``task``.

    Raises
    ------
    ConfigError
        If the model has nothing left to share.
    """
    sharing = Sharing(_global_part(task, settings.num_local_layers))
    return partly_shared(task, sharing, settings.unseen_epochs)


def _global_part(task: Task, num_local_layers: int | None) -> Tensor:
    """Return which weights belong to g, bool of shape (num_weights,)."""
    if num_local_layers is None:
        return task.head_mask
    layers_left(task.model, num_local_layers, "num_local_layers")
    return ~first_layers(task.model, num_local_layers)


SPEC = MethodSpec(
    title="LG-FedAvg",
    summary="A shared head on representations that stay with each client.",
    source="Liang et al. 2020, Algorithm 1",
    build=lg_fedavg,
    upload="< 1 (the head)",
    download="1",
    client_state="< 1 (all but the head)",
    server_state="1",
    unseen="trains its own representation under the shared head",
    reference_title=None,
    settings_type=LGFedAvgSettings,
)
