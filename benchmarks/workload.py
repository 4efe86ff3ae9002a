"""The benchmarked clients, generated reproducibly from a few numbers."""

import functools
import json
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid
from numpy.typing import NDArray

from knnper.client.client_app import make_client_app
from knnper.client.runtime import ClientRuntime
from knnper.data.examples import ClientData, Dataset, InputSpec, LabelledArrays
from knnper.data.image_folders import ImageFolderSettings
from knnper.errors import DataError
from knnper.experiment import Experiment
from knnper.experiment_file import load_experiment
from knnper.process import compute_device, num_workers
from knnper.seeding import RandomKey
from knnper.server.federation import Federation
from knnper.server.flower_federation import FlowerFederation
from knnper.server.task_size import TaskSize
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.flower_engine import NUM_NODES, VirtualNode, carrier_of
from knnper.simulation.flower_nodes import (
    in_turn,
    num_places,
    requests_at_once,
    run_nodes,
    wait_for_nodes,
)
from knnper.simulation.partition.clients import ClientPart, Clients, Partition
from knnper.simulation.partition.split import client_names
from knnper.simulation.workbench import Workbench, build_workbench, runtime_of
from knnper.strategies.core.method import changed
from knnper.strategies.core.records import ModelPayload, ModelUpdate, NoState
from knnper.transport.messages import Job

T = TypeVar("T")

NUM_IMAGES = 10_000
NUM_CLASSES = 10
LEARNING_RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Workload:
    """Clients of equal size that train one epoch per round."""

    num_clients: int
    num_train: int = 100  # images of each client, like the next two
    num_validation: int = 0
    num_test: int = 0
    batch_size: int = 128
    model: str = "mobilenet_v2"
    embedding_dim: int | None = None  # of models with this setting; None is the default
    method: str = "fedavg"
    echoes: bool = False  # whether clients only return the received model
    num_workers: int = 2  # processes of one thread each
    images: str = ""  # folder for the format ``image_folder``; else random images
    participation: float = 1.0
    gpus_per_client: float = 0.0  # 0 is the CPU; 0.1 is ten processes per GPU
    carrier: str = "auto"

    def experiment(self) -> Experiment:
        """Return the settings of the engine."""
        document = {
            "name": "benchmark",
            "data": {"name": "digits"},  # not read: see `dataset`
            "partition": {"name": "iid", "num_clients": self.num_clients},
            "model": self._model(),
            "training": {
                "batch_size": self.batch_size,
                "learning_rate": LEARNING_RATE,
                "momentum": MOMENTUM,
                "participation": self.participation,
            },
            "method": {"name": self.method},
            "run": {
                "num_workers": self.num_workers,
                "threads_per_worker": 1,
                "gpus_per_client": self.gpus_per_client,
                "carrier": self.carrier,
            },
        }
        return load_experiment(document, experiment_catalogue(), source="benchmark")

    def workbench(self, device: torch.device = torch.device("cpu")) -> Workbench:
        """Assemble data, clients, model and method."""
        data = self.dataset()
        bench = build_workbench(self.experiment(), data, self.partition(data), device)
        if not self.echoes:
            return bench
        return replace(bench, method=changed(bench.method, client_update=_echo))

    def dataset(self) -> Dataset:
        """Return coloured images of 32x32 pixels in ten classes."""
        if self.images:
            return ImageFolderSettings(root=self.images).load()
        spec = InputSpec((32, 32, 3), NUM_CLASSES, (0.5,) * 3, (0.25,) * 3)
        names = tuple(str(label) for label in range(NUM_CLASSES))
        return Dataset("random", _random_images(0), _random_images(1), spec, names)

    def partition(self, data: Dataset) -> Partition:
        """Assign consecutive images of ``data``, and repeat them if necessary."""
        return Partition(
            Clients.of(
                [
                    self._part(name, number, data)
                    for number, name in enumerate(client_names(self.num_clients))
                ]
            )
        )

    def _model(self) -> dict[str, object]:
        if self.embedding_dim is None:
            return {"name": self.model}
        return {"name": self.model, "embedding_dim": self.embedding_dim}

    def _part(self, name: str, number: int, data: Dataset) -> ClientPart:
        num_own = self.num_train + self.num_validation
        indices = _indices(number * num_own, num_own, len(data.train))
        return ClientPart(
            name=name,
            seen=True,
            train=indices[: self.num_train],
            validation=indices[self.num_train :],
            test=_indices(number * self.num_test, self.num_test, len(data.test)),
        )


def on_flower(workload: Workload, lead: Callable[[Workbench, Federation], T]) -> T:
    """Call ``lead`` with the workload's clients on Flower and Ray; return its result.

    Like `knnper.simulation.flower_engine`, with other data.
    """
    bench = workload.workbench()
    run = bench.experiment.run
    num_nodes = min(workload.num_clients, NUM_NODES)
    with tempfile.TemporaryDirectory() as folder, carrier_of(run) as carrier:

        def start(grid: Grid, stop: threading.Event) -> T:
            federation = FlowerFederation(
                grid=grid,
                choose_node=in_turn(wait_for_nodes(grid, stop, num_workers(run))),
                update_type=bench.method.update_type,
                experiment=json.dumps(asdict(workload)),
                run_folder=folder,
                carrier=carrier,
                at_once=requests_at_once(run),
                stop=stop,
                task_size=TaskSize(num_places(run)),
            )
            return lead(bench, federation)

        return run_nodes(client_app, num_nodes, run, start)


def _echo(
    payload: ModelPayload,
    client_state: NoState | None,  # noqa: ARG001 (one signature for all methods)
    data: ClientData,
    server_round: int,  # noqa: ARG001
    rng: RandomKey,  # noqa: ARG001
) -> tuple[NoState, ModelUpdate]:
    return NoState(), ModelUpdate(payload.weights, len(data.train), 0.0)


def _random_images(seed: int) -> LabelledArrays:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (NUM_IMAGES, 32, 32, 3), dtype=np.uint8)
    return LabelledArrays(pixels, rng.integers(0, NUM_CLASSES, NUM_IMAGES))


def _indices(start: int, count: int, length: int) -> NDArray[np.int64]:
    if count > length:
        raise DataError(f"expected at least {count} images a split, found {length}")
    return np.sort(np.arange(start, start + count, dtype=np.int64) % length)


@functools.lru_cache(maxsize=1)
def _resident_runtime(workload: str, run_folder: str) -> ClientRuntime:
    chosen = Workload(**json.loads(workload))
    device = compute_device(chosen.experiment().run)
    return runtime_of(chosen.workbench(device), Path(run_folder))


class _WorkloadHost(VirtualNode):
    """A node that runs the clients of a workload."""

    def open(self, context: Context, job: Job) -> ClientRuntime:  # noqa: ARG002
        return _resident_runtime(job.experiment, job.run_folder)


client_app = make_client_app(lambda _: _WorkloadHost())
