"""The runtime that plays virtual clients, made once in each worker process."""

import functools
from pathlib import Path

from flwr.app import ConfigRecord, Context, RecordDict

from client.app import make_client_app
from client.runtime import ClientRuntime
from client.state_store import ClientStateStore
from knnper.config.document import from_json
from knnper.config.errors import RunError
from knnper.machine import compute_device, keep_freed_memory
from knnper.transport.messages import Job
from knnper.transport.shared_memory import is_run_folder
from simulation.catalogue import experiment_catalogue
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


class VirtualHost:
    """A node of a simulation: it can play any virtual client."""

    def open(self, context: Context, job: Job) -> ClientRuntime:  # noqa: ARG002
        """See `client.app.Host`."""
        return _resident_runtime(job.experiment, job.run_folder, job.session)

    def carrier_folder(self, context: Context, job: Job) -> Path | None:  # noqa: ARG002
        """See `client.app.Host`: the run's folder in this machine's memory."""
        folder = Path(job.shared_folder)
        return folder if is_run_folder(folder) else None

    def introduce(self, context: Context, job: Job | None) -> RecordDict:  # noqa: ARG002
        """Return which node of how many this one is."""
        names = ("partition-id", "num-partitions")
        node = ConfigRecord({name: context.node_config[name] for name in names})
        return RecordDict({"node": node})

    def refused(self, context: Context, reason: str) -> None:  # noqa: ARG002
        """Refuse to be refused: every node of a simulation takes part.

        Raises
        ------
        RunError
            Always.
        """
        raise RunError(f"a node of a simulation was refused: {reason}")


client_app = make_client_app(VirtualHost())
