"""FedPer: the last layers of the model stay with each client.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization
Layers", 2019, Algorithms 1 and 2; a baseline of Chen et al. 2023 (Table 6). A client
j trains the base layers W_B, which all share, and its personalisation layers W_Pj
together,

    (W_B, W_Pj) ← SGD from (W_B of the server, W_Pj of its last round)

and sends W_B only. The server takes W_B = Σ_j γ_j W_Bj with γ_j = n_j / Σ n.

Departures from the paper:

- γ_j is normalised over the clients that replied, not over all.
- The paper counts the blocks of a network with skip connections as layers; here every
  convolution and every linear layer counts.
"""

from dataclasses import dataclass

from knnper.settings import NonNegativeInt, PositiveInt, Settings
from knnper.strategies.core.sharing import PartlyShared, first_layers, layers_left
from knnper.strategies.core.task import Task


@dataclass(frozen=True)
class FedPerSettings(Settings):
    """The personal part of the model.

    Attributes
    ----------
    num_personal_layers
        K_P, the personalisation layers, counted from the end: linear layers or
        convolutions, each with the normalisation behind it. 1 to 4 in the paper; 1 is
        the head, 0 is FedAvg.
    unseen_epochs
        Passes over its data in which an unseen client trains these layers.
    """

    num_personal_layers: NonNegativeInt = 1
    unseen_epochs: PositiveInt = 10


class FedPer(PartlyShared):
    """A shared model, except for the last layers, which stay with each client."""

    title = "FedPer"
    source = "Arivazhagan et al. 2019, Algorithms 1 and 2"
    upload = "< 1 (all but the last layers)"
    client_state = "< 1 (the last layers)"
    unseen = "trains its own last layers on the shared ones"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = None

    settings: FedPerSettings

    def __init__(self, task: Task, settings: FedPerSettings) -> None:
        num_base_layers = layers_left(
            task.model, settings.num_personal_layers, "num_personal_layers"
        )
        shared = first_layers(task.model, num_base_layers)
        super().__init__(task, settings, shared, settings.unseen_epochs)
