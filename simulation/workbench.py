"""The workbench: data, partition, model and method of an experiment.

Server and workers each build their own, since it depends on the experiment alone.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from knnper.client.runtime import ClientRuntime
from knnper.client.secure_sums import SecureSums
from knnper.client.state_store import ClientStateStore
from knnper.data.catalogue import load_data
from knnper.data.examples import Dataset
from knnper.experiment import Experiment
from knnper.metrics import computations
from knnper.own import explained
from knnper.predictions import RunPredictions, require_arrow
from knnper.process import keep_freed_memory
from knnper.seeding import RandomKey
from knnper.server.roster import Roster
from knnper.simulation.catalogue import require_central
from knnper.simulation.partition.clients import Partition
from knnper.simulation.partition.split import fingerprint, make_partition
from knnper.simulation.precision import with_faster_precision
from knnper.simulation.virtual_clients import VirtualClients, VirtualMembers
from knnper.strategies.core.assembly import (
    Assembly,
    assemble_with_task,
    task_of_experiment,
)
from knnper.strategies.core.embedding_pool import EmbeddingPool
from knnper.strategies.core.frozen import embedded, of_embeddings
from knnper.strategies.core.task import Task

CLIENTS = "clients"  # in a run's folder: the clients' states, for methods that have any


@dataclass(frozen=True)
class Workbench(Assembly):
    """An experiment with the virtual clients that share a central data set.

    Attributes
    ----------
    dataset
        With inputs, even if clients have embeddings.
    whole
        The task with the whole network, even if a head alone is trained.
    """

    partition: Partition
    clients: VirtualClients
    dataset: Dataset
    whole: Task

    @property
    def roster(self) -> Roster:
        """The clients' names and sizes for the server."""
        members = VirtualMembers(self.partition.clients)
        return Roster(members, fingerprint(self.partition))


@explained()
def open_workbench(
    experiment: Experiment,
    device: torch.device = torch.device("cpu"),
    pool: EmbeddingPool | None = None,
    *,
    as_embeddings: bool = True,
) -> Workbench:
    """Load the data, split it, build model and method.

    If a head alone is trained and ``as_embeddings``, clients have the embeddings of
    their inputs, which are computed once.
    """
    require_central(experiment)
    if experiment.run.save_predictions:
        require_arrow()
    dataset = load_data(experiment.data)
    key = RandomKey(experiment.run.seed)
    partition = make_partition(dataset, experiment.partition, key)
    if evaluated_on(experiment) == "validation":
        dataset = replace(dataset, test=dataset.train)
    if experiment.training.precision == "auto":
        experiment = with_faster_precision(experiment, dataset, device)
    return build_workbench(
        experiment, dataset, partition, device, pool, as_embeddings=as_embeddings
    )


def evaluated_on(experiment: Experiment) -> str:
    """Return the split that clients are evaluated on."""
    return str(getattr(experiment.partition.settings, "evaluate_on", "test"))


def build_workbench(
    experiment: Experiment,
    dataset: Dataset,
    partition: Partition,
    device: torch.device,
    pool: EmbeddingPool | None = None,
    *,
    as_embeddings: bool = True,
) -> Workbench:
    """Build model and method for a partition; see `open_workbench`."""
    keep_freed_memory()
    whole = task_of_experiment(experiment, dataset.spec, device)
    task = of_embeddings(whole) if as_embeddings else whole
    inputs = dataset
    if task is not whole:
        inputs = embedded(dataset, whole, experiment.model, task.spec)
    proxy = None
    if len(partition.proxy) > 0:
        proxy = functools.partial(inputs.train.examples_at, partition.proxy)
    task = replace(task, proxy=proxy, pool=pool or EmbeddingPool())
    assembly = assemble_with_task(experiment, task)
    return Workbench(
        experiment=assembly.experiment,
        key=assembly.key,
        task=assembly.task,
        method=assembly.method,
        partition=partition,
        clients=VirtualClients.of(inputs, partition),
        dataset=dataset,
        whole=whole,
    )


def runtime_of(bench: Workbench, run_folder: Path) -> ClientRuntime:
    """Return the runtime that runs all virtual clients of ``bench``."""
    run = bench.experiment.run
    split = evaluated_on(bench.experiment)
    return ClientRuntime(
        method=bench.method,
        spec=bench.task.spec,
        source=bench.clients,
        states=ClientStateStore(run_folder / CLIENTS),
        key=bench.key,
        pool=bench.task.pool,
        metrics=computations(run.metrics),
        predictions=RunPredictions(run_folder, split) if run.save_predictions else None,
        secure_sums=SecureSums(
            bench.experiment.training.secure_aggregation, run_folder / CLIENTS
        ),
    )
