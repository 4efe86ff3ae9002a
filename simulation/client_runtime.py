"""The runtime that plays virtual clients, made once in each worker process."""

import functools
from pathlib import Path

from flwr.app import ConfigRecord, Context

from client.app import make_client_app
from client.runtime import ClientRuntime
from client.state_store import ClientStateStore
from knnper.config.document import from_json
from knnper.transport.messages import Job
from simulation.catalogue import experiment_catalogue
from simulation.workbench import Workbench, open_workbench


def runtime_of(bench: Workbench, run_folder: Path) -> ClientRuntime:
    """Return the runtime that plays all virtual clients of ``bench``."""
    return ClientRuntime(
        method=bench.method,
        spec=bench.task.spec,
        source=bench.clients,
        states=ClientStateStore(run_folder / "clients"),
        key=bench.key,
    )


@functools.lru_cache(maxsize=1)
def _resident_runtime(experiment: str, run_folder: str) -> ClientRuntime:
    """Return this process's runtime; data, model and method are made once."""
    settings = from_json(experiment, experiment_catalogue())
    return runtime_of(open_workbench(settings), Path(run_folder))


def _open_runtime(context: Context, job: Job) -> ClientRuntime:  # noqa: ARG001
    return _resident_runtime(job.experiment, job.run_folder)


def _introduce(context: Context) -> ConfigRecord:
    names = ("partition-id", "num-partitions")
    return ConfigRecord({name: context.node_config[name] for name in names})


client_app = make_client_app(_open_runtime, _introduce)
