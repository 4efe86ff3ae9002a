"""Everything an experiment stands for, made from its settings alone.

Server and workers each make their own: it depends on nothing but the experiment.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from knnper.config.sections import Experiment
from knnper.config.seeding import RandomKey
from knnper.data.catalogue import DATA_SETS
from knnper.data.dataset import Dataset
from knnper.data.preprocess import Normalizer
from knnper.models.catalogue import build_model
from simulation.machine import prepare_process
from simulation.partition.split import Partition, make_partition
from simulation.virtual_clients import VirtualClients
from strategies.catalogue import METHODS
from strategies.core.method import Method
from strategies.core.task import Task


@dataclass(frozen=True)
class Workbench:
    """The parts of one experiment.

    Attributes
    ----------
    experiment
        Its settings.
    key
        The root of all its random choices.
    partition
        The split of the data.
    clients
        The virtual clients.
    task
        What is learned.
    method
        How.
    """

    experiment: Experiment
    key: RandomKey
    partition: Partition
    clients: VirtualClients
    task: Task
    method: Method


def open_workbench(
    experiment: Experiment, device: torch.device = torch.device("cpu")
) -> Workbench:
    """Load the data, split it, build model and method.

    What torch takes from the whole process is set too, see `prepare_process`.

    Parameters
    ----------
    experiment
        Its settings.
    device
        Where the model computes; `compute_device` says it of a process that plays
        clients. Data, records and whatever the method returns stay on the CPU.
    """
    dataset = DATA_SETS[experiment.data.name].load(experiment.data.settings)
    key = RandomKey(experiment.run.seed).child("partition")
    partition = make_partition(dataset, experiment.partition, key)
    return build_workbench(experiment, dataset, partition, device)


def build_workbench(
    experiment: Experiment, dataset: Dataset, partition: Partition, device: torch.device
) -> Workbench:
    """Build model and method on data that is split; see `open_workbench`."""
    prepare_process(experiment.run, device)
    key = RandomKey(experiment.run.seed)

    def fresh_weights(rng: RandomKey) -> Tensor:
        return build_model(experiment.model, dataset.spec, rng).read()

    model = build_model(experiment.model, dataset.spec, key.child("model"), device)
    task = Task(
        model=model,
        initial_weights=model.read(),
        fresh_weights=fresh_weights,
        normalize=Normalizer(dataset.spec, device),
        spec=dataset.spec,
        training=experiment.training,
        evaluation_batch_size=experiment.run.evaluation_batch_size,
    )
    spec = METHODS[experiment.method.name]
    method = spec.build(task, experiment.method.settings, experiment.personalization)
    clients = VirtualClients.of(dataset, partition)
    return Workbench(experiment, key, partition, clients, task, method)
