"""The runtime that plays virtual clients, made once in each worker process."""

import functools
import platform
from pathlib import Path

from flwr.app import ConfigRecord, Context

from client.app import make_client_app
from client.runtime import ClientRuntime
from client.state_store import ClientStateStore
from knnper.config.document import from_json
from knnper.config.errors import RunError
from knnper.transport.messages import Job
from simulation.catalogue import experiment_catalogue
from simulation.machine import compute_device
from simulation.workbench import Workbench, open_workbench
from strategies.core.records import NoState


def runtime_of(bench: Workbench, run_folder: Path) -> ClientRuntime:
    """Return the runtime that plays all virtual clients of ``bench``."""
    return ClientRuntime(
        method=bench.method,
        spec=bench.task.spec,
        source=bench.clients,
        states=ClientStateStore(run_folder / "clients"),
        key=bench.key,
        pool=bench.task.pool,
    )


@functools.lru_cache(maxsize=1)
def _resident_runtime(experiment: str, run_folder: str) -> ClientRuntime:
    """Return this process's runtime; data, model and method are made once."""
    settings = from_json(experiment, experiment_catalogue())
    bench = open_workbench(settings, compute_device(settings.run))
    _require_shared(bench, Path(run_folder))
    return runtime_of(bench, Path(run_folder))


def _require_shared(bench: Workbench, run_folder: Path) -> None:
    """Refuse to keep a client's state where other machines would not find it."""
    remembers = bench.method.client_state_type is not NoState
    if remembers and not (run_folder / "experiment.yaml").exists():
        raise RunError(
            f"{run_folder} is not the run's folder on {platform.node()}; clients of "
            f"{bench.experiment.method.name} keep their state there, so every machine "
            "of the cluster must see it under this path: give --output on a shared "
            "file system"
        )


def _open_runtime(context: Context, job: Job) -> ClientRuntime:  # noqa: ARG001
    return _resident_runtime(job.experiment, job.run_folder)


def introduce(context: Context) -> ConfigRecord:
    """Return which node of how many this one is."""
    names = ("partition-id", "num-partitions")
    return ConfigRecord({name: context.node_config[name] for name in names})


client_app = make_client_app(_open_runtime, introduce)
