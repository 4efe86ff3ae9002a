"""FedBN: BatchNorm stays with each client, all else is shared.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization", ICLR 2021, Algorithm 1; a baseline of Chen et al. 2023 (section
6), where "we learn the batchnorm parameters for each new client". Rounds are FedAvg's,
but for every BatchNorm layer: its scale, shift and running statistics never leave the
client.

Departure: the mean weights each client by its number of examples; the paper weights
clients equally.
"""

from dataclasses import dataclass

from torch import nn

from knnper.errors import ConfigError, Problem
from knnper.settings import PositiveInt, Settings
from knnper.strategies.core.sharing import PartlyShared
from knnper.strategies.core.task import Task

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class FedBNSettings(Settings):
    """How long an unseen client trains.

    Attributes
    ----------
    unseen_epochs
        Passes over its data in which a client that was never drawn learns scale, shift
        and running statistics; 20 in Chen et al. 2023. The statistics are moving
        averages, which a few mini-batches hardly move from where they start.
    """

    unseen_epochs: PositiveInt = 20


class FedBN(PartlyShared):
    """A shared model whose BatchNorm layers stay with each client."""

    title = "FedBN"
    source = "Li et al. 2021, Algorithm 1"
    upload = "< 1 (all but BatchNorm)"
    client_state = "< 1 (BatchNorm)"
    unseen = "learns its own BatchNorm in the shared model"
    learns_from_validation = "unseen"
    trains_unseen_from_start = True
    reference_title = None

    settings: FedBNSettings

    def __init__(self, task: Task, settings: FedBNSettings) -> None:
        local = task.model.mask(lambda module: isinstance(module, BATCH_NORMS))
        if not bool(local.any()):
            message = (
                "found fedbn with a model without BatchNorm, expected one with it, "
                "such as mobilenet_v2 with norm = batch; without it fedbn is fedavg: "
                "choose that, or another model"
            )
            raise ConfigError([Problem("method.name", message)])
        super().__init__(task, settings, ~local, settings.unseen_epochs)
