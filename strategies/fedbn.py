"""FedBN: BatchNorm layers stay with each client, all other layers are shared.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization", ICLR 2021, Algorithm 1; a baseline of Chen et al. 2023 (section
6), where "we learn the batchnorm parameters for each new client". Rounds are FedAvg's,
except that scale, shift and running statistics of BatchNorm never leave the client.

Departure from the paper: the mean weights clients by their examples; the paper weights
them equally.
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
    """The training of an unseen client.

    Attributes
    ----------
    unseen_epochs
        Passes over its data in which an unseen client learns scale, shift and running
        statistics; 20 in Chen et al. 2023. The statistics are moving averages, which
        change little in a few mini-batches.
    """

    unseen_epochs: PositiveInt = 20


class FedBN(PartlyShared):
    """A shared model, except for BatchNorm layers, which stay with each client."""

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
                "found fedbn with a model without BatchNorm, expected a model with it, "
                "such as mobilenet_v2 with norm = batch; without it fedbn is fedavg: "
                "choose that, or another model"
            )
            raise ConfigError([Problem("method.name", message)])
        super().__init__(task, settings, ~local, settings.unseen_epochs)
