"""An experiment made real: data, partition, model, method; and the serial engine.

Server and workers each make their own: it depends on nothing but the experiment.
"""

import contextlib
import functools
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from knnper.client.runtime import ClientRuntime
from knnper.client.state_store import ClientStateStore
from knnper.data.catalogue import DATA_SETS, load_data
from knnper.data.examples import ClientData, Dataset, Examples, LabelledArrays
from knnper.data.own_data import OWN_DATA
from knnper.data.site_data import SITES, SitesSettings, sites_settings, task_of
from knnper.errors import (
    ConfigError,
    KnnPerError,
    OwnCodeError,
    Problem,
    RunError,
)
from knnper.experiment import (
    LARGEST_COUNT,
    Catalogue,
    Choice,
    Experiment,
    Precision,
    is_timed_by_clients,
    plain,
    shown,
)
from knnper.files import read_document, write_atomically
from knnper.metrics import computations
from knnper.own import Door, explained
from knnper.predictions import Predictions, require_arrow
from knnper.process import compute_device, keep_freed_memory
from knnper.records import canonical
from knnper.seeding import RandomKey
from knnper.server.federation import Federation, Reply, Request, Step
from knnper.server.observer import Observer
from knnper.server.run import Conductor
from knnper.server.run_folder import Member, Roster, RunFolder
from knnper.simulation.partition.own import OWN_PARTITION
from knnper.simulation.partition.schemes import (
    PARTITIONS,
    CountedSettings,
    Integers,
    PartitionSettings,
)
from knnper.simulation.partition.split import (
    MOST_DRAWN,
    Clients,
    Partition,
    PartsByName,
    fingerprint,
    make_partition,
)
from knnper.strategies.catalogue import (
    KINDS,
    SITE_DATA_SETS,
    SITE_PARTITIONS,
    Assembly,
    OpenDoor,
    bound,
    catalogue_of,
    personalizer_of,
    settings_types,
    task_of_experiment,
)
from knnper.strategies.core.frozen import embedded, of_embeddings
from knnper.strategies.core.method import NoSettings
from knnper.strategies.core.task import EmbeddingPool, Task
from knnper.strategies.core.training import local_sgd
from knnper.transport.messages import Purpose

# Rounding must not make a client disappear: 0.1 of 30 is 3.0000000000000004.
_TOLERANCE = 1e-9


def experiment_catalogue(door: OpenDoor = Door) -> Catalogue:
    """Return the catalogue of everything this project ships.

    Users' code comes through the ``door`` of the folder that an experiment names.
    """
    return catalogue_of(
        {**settings_types(DATA_SETS), **SITE_DATA_SETS},
        {**settings_types(PARTITIONS), **SITE_PARTITIONS},
        check_experiment,
        {**KINDS, "data": OWN_DATA, "partition": OWN_PARTITION},
        door,
    )


def check_experiment(experiment: Experiment) -> Sequence[Problem]:
    """Return what in the data's sections does not go together."""
    found, settings = list[Problem](), experiment.partition.settings
    data, partition = experiment.data.name, experiment.partition.name
    if (data == SITES) != (partition == SITES):
        message = (
            f"found {partition} with data of {data}, expected {{name: sites}} for "
            "both or for neither: data that stays with the sites is not split"
        )
        found.append(Problem("partition.name", message))
    if isinstance(settings, CountedSettings):
        found.extend(_participation_problems(experiment, settings))
    on_top = experiment.personalization
    if (
        isinstance(settings, PartitionSettings)
        and settings.proxy_fraction == 0
        and personalizer_of(on_top).needs_proxy
    ):
        message = (
            f"found 0 with {on_top.name}, which samples from examples of the server's; "
            "expected a part that the server keeps, such as 0.05"
        )
        found.append(Problem("partition.proxy_fraction", message))
    return found


def _participation_problems(
    experiment: Experiment, partition: CountedSettings
) -> Iterable[Problem]:
    """Yield why no client would ever train."""
    num_clients, unseen_fraction = partition.num_clients, partition.unseen_fraction
    num_seen = num_clients - int(unseen_fraction * num_clients + 0.5)
    participation = experiment.training.participation
    if num_seen < 1:
        message = (
            f"found {unseen_fraction} of {num_clients} clients, which leaves none to "
            "train; expected a smaller part, or more clients"
        )
        yield Problem("partition.unseen_fraction", message)
    elif participation * num_seen < 1 - _TOLERANCE:
        message = (
            f"found {participation} of {num_seen} seen clients, which is less than one "
            f"client a round; expected at least {1 / num_seen:.3g}"
        )
        yield Problem("training.participation", message)


def over_sites(experiment: Experiment) -> Experiment:
    """Return the experiment over data that stays with the sites."""
    if experiment.data.name == SITES:
        return experiment
    dataset = load_data(experiment.data)
    return replace(
        experiment,
        data=Choice(SITES, sites_settings(task_of(dataset))),
        partition=Choice(SITES, NoSettings()),
    )


def require_central(experiment: Experiment) -> None:
    """Refuse an experiment that needs real clients."""
    if isinstance(experiment.data.settings, SitesSettings):
        raise RunError(
            "the experiment is over data that stays with the sites, so it cannot be "
            "simulated; run it on them with `knnper fed submit`, or name a data set in "
            "the section data and how it is split in the section partition"
        )
    training = experiment.training
    if is_timed_by_clients(training):
        message = (
            f"found {shown(plain(training.timing))} without training.devices; say how "
            "fast the simulated clients are, or leave it out"
        )
        raise ConfigError([Problem("training.timing", message)], experiment.name)


@dataclass(frozen=True)
class VirtualClients:
    """The data source of a simulation."""

    dataset: Dataset
    parts: PartsByName

    @classmethod
    def of(cls, dataset: Dataset, partition: Partition) -> "VirtualClients":
        """Return the virtual clients of ``partition``."""
        return cls(dataset, PartsByName(partition.clients))

    def data(self, client: str) -> ClientData:
        """Return what ``client`` learns from, copied out of the memory map."""
        part = self.parts[client]
        return ClientData(
            train=self.dataset.train.examples_at(part.train),
            validation=self.dataset.train.examples_at(part.validation),
        )

    def test(self, client: str) -> Examples:
        """Return the test split of ``client``, copied out of the memory map."""
        return self.dataset.test.examples_at(self.parts[client].test)

    def test_names(self, client: str) -> Integers:
        """Return the indices into the data set's test split."""
        return self.parts[client].test

    def class_weights(self, client: str) -> Tensor | None:
        """Return what a test example of each label counts, float64 (c,), or None."""
        weights = self.parts[client].class_weights
        return None if weights is None else torch.from_numpy(weights)

    def is_seen(self, client: str) -> bool:
        """Return whether ``client`` may take part in training."""
        return bool(self.parts.clients.seen[self.parts.place(client)])


@dataclass(frozen=True)
class Workbench(Assembly):
    """An experiment with the virtual clients that a central data set is split over."""

    partition: Partition
    clients: VirtualClients
    dataset: Dataset  # as it is; the clients' may be of embeddings
    whole: Task  # as the task, with the whole network where that trains a head alone

    @property
    def roster(self) -> Roster:
        """The clients as the server knows them."""
        members = _Members(self.partition.clients)
        return Roster(members, fingerprint(self.partition))


@dataclass(frozen=True, eq=False)
class _Members(Iterable[Member]):
    """Virtual clients, each made when it is looked at: there may be a million."""

    clients: Clients

    def __iter__(self) -> Iterator[Member]:
        clients = self.clients
        claims, titles = [False] * len(clients), clients.titles or [""] * len(clients)
        counts = clients.seen.tolist(), *clients.sizes.tolist()
        yield from map(Member, clients.names, *counts, claims, titles)


@explained()
def open_workbench(
    experiment: Experiment,
    device: torch.device = torch.device("cpu"),
    pool: EmbeddingPool | None = None,
    *,
    as_embeddings: bool = True,
) -> Workbench:
    """Load the data, split it, build model and method.

    Where a head alone is trained, ``as_embeddings`` says whether clients have the
    embeddings of their inputs, computed once, or the inputs.
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
        experiment = _with_faster_precision(experiment, dataset, device)
    made = experiment, dataset, partition, device, pool
    return build_workbench(*made, as_embeddings=as_embeddings)


_TIMED_STEPS, _TIMES = 5, 5
# Of the time of a step in float32; what saves less is not worth another result.
_WORTH_IT = 0.95


def _with_faster_precision(
    experiment: Experiment, dataset: Dataset, device: torch.device
) -> Experiment:
    """Return the experiment with the precision in which its steps are faster here."""
    training, tasks = experiment.training, dict[Precision, Task]()
    with contextlib.suppress(RunError):  # where the CPU cannot run bfloat16
        for precision in get_args(Precision):
            fixed = replace(training, precision=precision)
            one = replace(experiment, training=fixed)
            tasks[precision] = task_of_experiment(one, dataset.spec, device)
    size = min(training.batch_size, len(dataset.train))
    batch = dataset.train.examples_at(np.arange(size))

    def step_s(whole: Task) -> float:
        task, examples = of_embeddings(whole), batch
        if task is not whole:
            embeddings = whole.embed(whole.model.read(), batch.images)
            examples = Examples(embeddings, batch.labels)
        key, started = RandomKey(0), time.perf_counter()
        how = task.model.read(), examples, training.learning_rate, key
        local_sgd(task, *how, num_epochs=_TIMED_STEPS)
        return (time.perf_counter() - started) / _TIMED_STEPS

    # In turn, after one time to warm up: others may use the machine meanwhile.
    times = [
        {name: step_s(task) for name, task in tasks.items()} for _ in range(_TIMES)
    ]
    steps = {name: statistics.median(one[name] for one in times[1:]) for name in tasks}
    faster = steps.get("bfloat16", math.inf) < _WORTH_IT * steps["float32"]
    chosen: Precision = "bfloat16" if faster else "float32"
    told = ", ".join(f"{1000 * one:.1f} ms in {name}" for name, one in steps.items())
    # A user is to see it: it decides what the results are.
    log.warning("training.precision is %s here: a step takes %s", chosen, told)
    return replace(experiment, training=replace(training, precision=chosen))


def evaluated_on(experiment: Experiment) -> str:
    """Return which of their splits the clients are tested on."""
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
    """Build model and method on data that is split; see `open_workbench`."""
    keep_freed_memory()
    whole = task_of_experiment(experiment, dataset.spec, device)
    task, inputs = of_embeddings(whole) if as_embeddings else whole, dataset
    if task is not whole:
        inputs = embedded(dataset, whole, experiment.model, task.spec)
    proxy = None
    if len(partition.proxy) > 0:
        proxy = functools.partial(inputs.train.examples_at, partition.proxy)
    task = replace(task, proxy=proxy, pool=pool or EmbeddingPool())
    made = bound(experiment, task)
    return Workbench(
        *(made.experiment, made.key, made.task, made.method),
        *(partition, VirtualClients.of(inputs, partition), dataset, whole),
    )


log = logging.getLogger(__name__)

PARTITION = "partition.json"  # in the folder of a run over virtual clients
Counts = tuple[Annotated[int, Field(ge=0, le=LARGEST_COUNT)], ...]


@dataclass(frozen=True)
class ClientCounts:
    """One client's examples by label."""

    client: str
    seen: bool
    train: Counts
    validation: Counts
    test: Counts


@dataclass(frozen=True)
class LabelCounts:
    """A partition as counts."""

    class_names: tuple[str, ...]
    clients: tuple[ClientCounts, ...]
    num_skipped: int = 0  # examples that could not be read, and were left out

    def __post_init__(self) -> None:
        """Refuse counts of other labels than there are."""
        for one in self.clients:
            for counts in (one.train, one.validation, one.test):
                if len(counts) != len(self.class_names):
                    raise ValueError(
                        f"{one.client} has {len(counts)} counts for "
                        f"{len(self.class_names)} labels"
                    )

    @property
    def local(self) -> Integers:
        """What clients learn from, training and validation examples, (M, c)."""
        found = [np.add(one.train, one.validation) for one in self.clients]
        return np.array(found, dtype=np.int64)


def count_labels(clients: VirtualClients) -> LabelCounts:
    """Return what each client has of each label."""
    data = clients.dataset

    def counts(split: LabelledArrays, indices: Integers) -> Counts:
        labels = split.labels[indices]
        return tuple(np.bincount(labels, minlength=data.spec.num_classes).tolist())

    counted = [
        ClientCounts(
            part.shown,
            part.seen,
            train=counts(data.train, part.train),
            validation=counts(data.train, part.validation),
            test=counts(data.test, part.test),
        )
        for part in clients.parts.values()
    ]
    return LabelCounts(tuple(data.class_names), tuple(counted), data.num_skipped)


def keep_label_counts(clients: VirtualClients, run_folder: Path) -> None:
    """Write ``partition.json``, unless the run has it; tell what was left out.

    There is none for more than `MOST_DRAWN` clients.
    """
    if clients.dataset.num_skipped:
        log.warning(
            "examples that cannot be read, and are left out: %d; "
            "data.on_error=refuse lists them",
            clients.dataset.num_skipped,
        )
    path = run_folder / PARTITION
    if not path.exists() and len(clients.parts) <= MOST_DRAWN:
        write_atomically(path, f"{json.dumps(asdict(count_labels(clients)))}\n")


def read_label_counts(run_folder: Path) -> LabelCounts | None:
    """Return the content of ``partition.json``; None where a run has none."""
    mend = "remove it, and reports leave the picture of the split out"
    return read_document(LabelCounts, run_folder / PARTITION, mend)


def runtime_of(bench: Workbench, run_folder: Path) -> ClientRuntime:
    """Return the runtime that runs all virtual clients of ``bench``."""
    run, split = bench.experiment.run, evaluated_on(bench.experiment)
    return ClientRuntime(
        method=bench.method,
        spec=bench.task.spec,
        source=bench.clients,
        states=ClientStateStore(run_folder / "clients"),
        key=bench.key,
        pool=bench.task.pool,
        metrics=computations(run.metrics),
        predictions=Predictions(run_folder, split) if run.save_predictions else None,
    )


@dataclass(frozen=True)
class SerialFederation(Federation):
    """A `Federation` that calls the clients as functions."""

    runtime: ClientRuntime

    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        """See `Federation.exchange`."""
        for request in requests:
            try:
                record = self._answer(step, request)
            except OwnCodeError:
                raise
            except KnnPerError as error:
                yield Reply(request.clients, None, str(error))
            else:
                yield Reply(request.clients, canonical(record))

    def _answer(self, step: Step, request: Request) -> Any:
        clients, payload = request.clients, canonical(request.payload)
        if step.purpose is Purpose.TRAIN:
            (client,), (state_round,) = clients, request.state_rounds
            return self.runtime.train(
                client,
                payload,
                request.server_round or step.server_round,
                state_round,
                step.keep_rounds,
                step.server_round,
            )
        if step.purpose is Purpose.VALIDATE:
            reference = request.reference and canonical(request.reference)
            number, rounds = step.server_round, request.state_rounds
            return self.runtime.validate(clients, payload, reference, number, rounds)
        reference, rounds = canonical(request.reference), request.state_rounds
        return self.runtime.personalize(clients, payload, reference, rounds)


def simulate(
    bench: Workbench, folder: RunFolder, observer: Observer, command: Sequence[str]
) -> Mapping[str, Any]:
    """Run an experiment on the engine it names."""
    if folder.is_finished():
        return folder.results()

    def body(federation: Federation) -> Mapping[str, Any]:
        conductor = Conductor(bench, federation, folder, observer)
        return conductor.lead(bench.roster, command)

    try:
        with folder.locked():
            keep_label_counts(bench.clients, folder.path)
            return _run(bench, folder, body)
    finally:
        observer.finished()


def _run(
    bench: Workbench, folder: RunFolder, body: Callable[[Federation], Mapping[str, Any]]
) -> Mapping[str, Any]:
    if bench.experiment.run.engine == "serial":
        device = compute_device(bench.experiment.run)
        workers = bench
        if device.type != "cpu":
            workers = open_workbench(bench.experiment, device, bench.task.pool)
        return body(SerialFederation(runtime_of(workers, folder.path)))
    # Ray takes seconds to import, which the serial engine need not wait for.
    from knnper.simulation.flower_engine import run_on_flower

    return run_on_flower(bench, folder.path, body)
