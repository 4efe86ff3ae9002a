"""The runtime that plays virtual clients, made once in each worker process."""

import functools
from pathlib import Path

from flwr.app import ConfigRecord, Context

from client.app import make_client_app
from client.runtime import ClientRuntime
from client.state_store import ClientStateStore
from knnper.config.document import from_json
from knnper.config.errors import RunError
from knnper.transport.messages import Job
from simulation.catalogue import experiment_catalogue
from simulation.machine import compute_device, keep_freed_memory
from simulation.workbench import Workbench, open_workbench
from strategies.core.records import NoState

SESSION_FILE = ".session"


def runtime_of(bench: Workbench, run_folder: Path) -> ClientRuntime:
    """Return the runtime that plays all virtual clients of ``bench``.

    From here on this process trains, and keeps memory for it.
    """
    keep_freed_memory()
    return ClientRuntime(
        method=bench.method,
        spec=bench.task.spec,
        source=bench.clients,
        states=ClientStateStore(run_folder / "clients"),
        key=bench.key,
        pool=bench.task.pool,
    )


@functools.lru_cache(maxsize=1)
def _resident_runtime(experiment: str, run_folder: str, session: str) -> ClientRuntime:
    """Return this process's runtime; data, model and method are made once."""
    settings = from_json(experiment, experiment_catalogue())
    bench = open_workbench(settings, compute_device(settings.run))
    if bench.method.client_state_type is not NoState:
        require_same_folder(Path(run_folder), session)
    return runtime_of(bench, Path(run_folder))


def require_same_folder(run_folder: Path, session: str) -> None:
    """Refuse to keep clients' states where other machines would not find them.

    Parameters
    ----------
    run_folder
        The run's folder, as the server calls it.
    session
        What the server wrote to the file `SESSION_FILE` in it.

    Raises
    ------
    RunError
        If it is another folder here.
    """
    path = run_folder / SESSION_FILE
    if not path.exists() or path.read_text() != session:
        raise RunError(
            f"{run_folder} is not the run's folder here. Clients of this method keep "
            "their state there, so every machine must see it under this path: give "
            "--output on a file system that all of them share"
        )


def _open_runtime(context: Context, job: Job) -> ClientRuntime:  # noqa: ARG001
    return _resident_runtime(job.experiment, job.run_folder, job.session)


def introduce(context: Context) -> ConfigRecord:
    """Return which node of how many this one is."""
    names = ("partition-id", "num-partitions")
    return ConfigRecord({name: context.node_config[name] for name in names})


client_app = make_client_app(_open_runtime, introduce)
