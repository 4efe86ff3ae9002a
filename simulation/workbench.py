"""Everything an experiment stands for, made from its settings alone.

Server and workers each make their own: it depends on nothing but the experiment.
"""

import functools
from dataclasses import dataclass, replace

import torch

from knnper.config.sections import Experiment
from knnper.config.seeding import RandomKey
from knnper.data.catalogue import DATA_SETS
from knnper.data.dataset import Dataset
from server.roster import Roster
from simulation.partition.settings import PartitionSettings
from simulation.partition.split import Partition, fingerprint, make_partition
from simulation.sites import require_central
from simulation.virtual_clients import VirtualClients
from strategies.assembly import Assembly, assemble
from strategies.core.embedding_pool import EmbeddingPool


@dataclass(frozen=True)
class Workbench(Assembly):
    """An experiment with the virtual clients that a central data set is dealt to.

    Attributes
    ----------
    partition
        The split of the data.
    clients
        The virtual clients.
    """

    partition: Partition
    clients: VirtualClients

    @property
    def roster(self) -> Roster:
        """The clients as the server knows them."""
        return Roster.of(self.clients.members(), fingerprint(self.partition))


def open_workbench(
    experiment: Experiment,
    device: torch.device = torch.device("cpu"),
    pool: EmbeddingPool | None = None,
) -> Workbench:
    """Load the data, split it, build model and method.

    What torch takes from the whole process is set too, see `assemble`.

    Parameters
    ----------
    experiment
        Its settings.
    device
        Where the model computes; `compute_device` says it of a process that plays
        clients. Data, records and whatever the method returns stay on the CPU.
    pool
        Where the method looks for embeddings first; one of its own by default.

    Raises
    ------
    RunError
        If the data stays with the sites.
    DataError
        If it cannot be loaded.
    """
    require_central(experiment)
    dataset = DATA_SETS[experiment.data.name].load(experiment.data.settings)
    partition = deal(experiment, dataset)
    if _tests_on_validation(experiment):
        dataset = replace(dataset, test=dataset.train)
    return build_workbench(experiment, dataset, partition, device, pool)


def deal(experiment: Experiment, dataset: Dataset) -> Partition:
    """Return who of an experiment's clients has which examples of its data set.

    Raises
    ------
    DataError
        If the partition cannot be made of this data set.
    """
    key = RandomKey(experiment.run.seed).child("partition")
    return make_partition(dataset, experiment.partition, key)


def _tests_on_validation(experiment: Experiment) -> bool:
    settings = experiment.partition.settings
    return isinstance(settings, PartitionSettings) and (
        settings.evaluate_on == "validation"
    )


def build_workbench(
    experiment: Experiment,
    dataset: Dataset,
    partition: Partition,
    device: torch.device,
    pool: EmbeddingPool | None = None,
) -> Workbench:
    """Build model and method on data that is split; see `open_workbench`."""
    proxy = None
    if len(partition.proxy) > 0:
        proxy = functools.partial(dataset.train.examples_at, partition.proxy)
    made = assemble(experiment, dataset.spec, device, proxy, pool)
    return Workbench(
        experiment=experiment,
        key=made.key,
        task=made.task,
        method=made.method,
        partition=partition,
        clients=VirtualClients.of(dataset, partition),
    )
