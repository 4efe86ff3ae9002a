"""LG-FedAvg: the first layers of the model stay with each client.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act
Globally: Federated Learning with Local and Global Representations", 2020, Algorithm 1;
a baseline of Chen et al. 2023 (Table 6). A client m trains its local representation
ℓ_m(·; θ_m^ℓ) and the global model g(·; θ^g) on top of it together,

    (θ_m^ℓ, θ_m^g) ← SGD from (θ_m^ℓ of its last round, θ^g of the server)

and sends θ_m^g only. The server takes the mean, weighted by examples.

Departures from the paper:

- Only the supervised local loss is used, without auxiliary and fair representations.
- The paper sends inputs of unknown devices through all trained local models. Here local
  models never leave their clients, and an unseen client trains its own under the global
  model.
"""

from dataclasses import dataclass

from knnper.settings import NonNegativeInt, PositiveInt, Settings
from knnper.strategies.core.sharing import PartlyShared, first_layers, layers_left
from knnper.strategies.core.task import Task


@dataclass(frozen=True)
class LGFedAvgSettings(Settings):
    """The local part of the model.

    Attributes
    ----------
    num_local_layers
        The number of layers of ℓ, counted from the start: convolutions or linear
        layers, each with the normalisation behind it. Null is all but the head; 0 is
        FedAvg.
    unseen_epochs
        Passes over its data in which an unseen client trains these layers.
    """

    num_local_layers: NonNegativeInt | None = None
    unseen_epochs: PositiveInt = 10


class LGFedAvg(PartlyShared):
    """A shared head on representations that stay with each client."""

    title = "LG-FedAvg"
    source = "Liang et al. 2020, Algorithm 1"
    upload = "< 1 (the head)"
    client_state = "< 1 (all but the head)"
    unseen = "trains its own representation under the shared head"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = None

    settings: LGFedAvgSettings

    def __init__(self, task: Task, settings: LGFedAvgSettings) -> None:
        shared, num_local = task.head_mask, settings.num_local_layers
        if num_local is not None:
            layers_left(task.model, num_local, "num_local_layers")
            shared = ~first_layers(task.model, num_local)
        super().__init__(task, settings, shared, settings.unseen_epochs)
