"""The virtual clients of an experiment as nodes of Flower's simulation."""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from knnper.client.client_app import make_client_app
from knnper.client.runtime import ClientRuntime
from knnper.errors import KnnPerError, OwnCodeError, RunError
from knnper.experiment import RunSettings
from knnper.experiment_file import from_json, to_json
from knnper.files import write_atomically
from knnper.process import compute_device, num_workers
from knnper.secure.messages import SecureReply, SecureRequest
from knnper.server.federation import Federation
from knnper.server.flower_federation import FlowerFederation
from knnper.server.task_size import TaskSize
from knnper.simulation.catalogue import experiment_catalogue
from knnper.simulation.flower_nodes import (
    T,
    in_turn,
    num_places,
    requests_at_once,
    run_nodes,
    wait_for_nodes,
)
from knnper.simulation.object_store import ObjectStore
from knnper.simulation.workbench import Workbench, open_workbench, runtime_of
from knnper.strategies.core.records import NoState
from knnper.transport import shared_memory
from knnper.transport.flower_protocol import is_plain
from knnper.transport.messages import (
    IN_MESSAGE,
    CannotRunError,
    Carrier,
    Files,
    Job,
)
from knnper.transport.shared_memory import (
    is_run_folder,
)

SESSION_FILE = ".session"
# The most nodes of a simulation; any node can run any client.
NUM_NODES = 64


@functools.lru_cache(maxsize=1)
def _resident_runtime(experiment: str, run_folder: str, session: str) -> ClientRuntime:
    """Return this process's runtime; data, model and method are built once."""
    settings = from_json(experiment, experiment_catalogue())
    bench = open_workbench(settings, compute_device(settings.run))
    writes = settings.run.save_predictions or settings.training.secure_aggregation
    if bench.method.client_state_type is not NoState or writes:
        require_same_folder(Path(run_folder), session)
    return runtime_of(bench, Path(run_folder))


def require_same_folder(run_folder: Path, session: str) -> None:
    """Reject a run folder that other machines do not share."""
    path = run_folder / SESSION_FILE
    if not path.exists() or path.read_text() != session:
        raise RunError(
            f"{run_folder} is not the run's folder on this machine. Clients of this "
            "run write their state to it, so every machine must see it under this "
            "path: give --output on a file system that all of them share"
        )


class VirtualNode:
    """A node of a simulation: it can run any virtual client."""

    def open(self, context: Context, job: Job) -> ClientRuntime:  # noqa: ARG002
        """Return the runtime of this process."""
        try:
            return _resident_runtime(job.experiment, job.run_folder, job.session)
        except (KnnPerError, OSError) as error:
            raise CannotRunError(str(error)) from error

    def exchange_secrets(
        self, context: Context, job: Job, request: SecureRequest
    ) -> SecureReply:
        """Reply to a stage of secure aggregation."""
        return self.open(context, job).secure_sums.answer(job.clients, request)

    def carrier(self, context: Context, job: Job) -> Carrier:  # noqa: ARG002
        """Return the carrier of a job: object store, shared memory or the message."""
        if job.shared_folder == ObjectStore.name:
            return ObjectStore(shares=False)
        folder = Path(job.shared_folder)
        return Files(folder) if is_run_folder(folder) else IN_MESSAGE

    def introduce(self, context: Context, job: Job | None) -> RecordDict:  # noqa: ARG002
        """Return the node's number and the number of nodes."""
        names = ("partition-id", "num-partitions")
        node = ConfigRecord({name: context.node_config[name] for name in names})
        return RecordDict({"node": node})

    def refused(self, context: Context, reason: str) -> None:  # noqa: ARG002
        """Raise an error: every node of a simulation must take part."""
        raise RunError(f"a node of a simulation was refused: {reason}")

    def answered(self, message: Message, context: Context) -> None:
        """Do nothing."""

    def failed(self, message: Message, context: Context, error: Exception) -> Message:  # noqa: ARG002
        """Raise the error; in a simulation nothing must be hidden from the server."""
        # Users' code fails for all clients in the same way.
        if isinstance(error, OwnCodeError):
            raise CannotRunError(str(error)) from error
        raise error


client_app = make_client_app(lambda _: VirtualNode())


def run_on_flower(
    bench: Workbench, run_folder: Path, body: Callable[[Federation], T]
) -> T:
    """Start the virtual clients on Ray, run the server ``body``, shut them down."""
    run = bench.experiment.run
    num_nodes = min(len(bench.clients.parts), NUM_NODES)
    with carrier_of(run) as carrier:

        def lead(grid: Grid, stop: threading.Event) -> T:
            return body(flower_federation(grid, bench, run_folder, carrier, stop))

        return run_nodes(client_app, num_nodes, run, lead)


@contextlib.contextmanager
def carrier_of(run: RunSettings) -> Iterator[Carrier]:
    """Open the carrier of a run's models."""
    is_auto = run.carrier == "auto"
    in_memory = run.carrier == "shared_memory" or (is_auto and not run.ray_address)
    with shared_memory.shared_folder() if in_memory else nullcontext() as folder:
        if folder is not None:
            yield Files(folder)
        elif run.carrier == "shared_memory":
            raise RunError(
                "run.carrier is shared_memory, and "
                f"{shared_memory.MEMORY_FILE_SYSTEM} is missing or has less than "
                f"{shared_memory.LEAST_FREE_BYTES >> 20} MiB free. Make it larger "
                "(--shm-size in a container), or set run.carrier to auto"
            )
        elif run.carrier == "message" or (is_auto and is_plain()):
            yield IN_MESSAGE
        else:
            yield ObjectStore(shares=True)


def flower_federation(
    grid: Grid,
    bench: Workbench,
    run_folder: Path,
    carrier: Carrier,
    stop: threading.Event,
) -> Federation:
    """Wait for all nodes of ``grid``; return the federation of virtual clients."""
    session, run = uuid.uuid4().hex, bench.experiment.run
    write_atomically(run_folder / SESSION_FILE, session)
    return FlowerFederation(
        grid=grid,
        choose_node=in_turn(wait_for_nodes(grid, stop, num_workers(run))),
        update_type=bench.method.update_type,
        experiment=to_json(bench.experiment),
        run_folder=str(run_folder.resolve()),
        carrier=carrier,
        session=session,
        at_once=requests_at_once(run),
        stop=stop,
        task_size=TaskSize(num_places(run)),
    )
