"""Flower's simulation runtime, driven in this process.

The only place that knows a private entry point of Flower: the public one takes no
settings of the run and logs that it is deprecated. The version of Flower is pinned for
it, and a test runs it.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from flwr.app import Context
from flwr.common import EventType
from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.serverapp import Grid, ServerApp
from flwr.simulation.run_simulation import _run_simulation

from knnper.config.document import to_json
from knnper.config.errors import RunError
from knnper.config.sections import RunSettings
from knnper.transport import shared_memory
from server.federation import Federation
from server.flower_federation import FlowerFederation
from server.nodes import assign_nodes, wait_for_nodes
from simulation.client_runtime import client_app
from simulation.workbench import Workbench

T = TypeVar("T")

# Read when a run starts: Flower reports nothing and looks nothing up, and Ray does
# not warn of what a later version will do with workers that reserve no GPU.
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def run_on_flower(
    bench: Workbench, run_folder: Path, body: Callable[[Federation], T]
) -> T:
    """Start the virtual clients on Ray, lead them with ``body``, shut them down.

    Parameters
    ----------
    bench
        The experiment.
    run_folder
        Where clients keep their state.
    body
        What the server does; it runs in a thread of this process.

    Returns
    -------
    T
        What ``body`` returned.

    Raises
    ------
    RunError
        If Flower ended without an answer from ``body``.
    """
    outcome: list[T] = []
    stop = threading.Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        with flower_federation(grid, bench, run_folder, stop) as federation:
            outcome.append(body(federation))

    os.environ.update(_QUIET)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        _run_simulation(
            num_supernodes=len(bench.clients.parts),
            exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
            client_app=client_app,
            server_app=server_app,
            backend_config=_backend_config(bench.experiment.run),
        )
    finally:
        stop.set()
    if not outcome:
        raise RunError("Flower's simulation ended before the run did")
    return outcome[0]


@contextlib.contextmanager
def flower_federation(
    grid: Grid, bench: Workbench, run_folder: Path, stop: threading.Event
) -> Iterator[Federation]:
    """Yield the virtual clients behind ``grid``.

    Models travel as files in memory where this machine has room for them.
    """
    nodes = wait_for_nodes(grid, stop)
    with contextlib.ExitStack() as stack:
        folder = ""
        if shared_memory.available():
            folder = str(stack.enter_context(shared_memory.shared_folder()))
        yield FlowerFederation(
            grid=grid,
            node_of=assign_nodes(bench.clients.names(), nodes),
            update_type=bench.method.update_type,
            experiment=to_json(bench.experiment),
            run_folder=str(run_folder.resolve()),
            shared_folder=folder,
            stop=stop,
        )


def num_workers(run: RunSettings) -> int:
    """Return the number of worker processes: as set, or one a usable CPU core."""
    return run.num_workers or len(os.sched_getaffinity(0))


def _backend_config(run: RunSettings) -> BackendConfig:
    return {
        "client_resources": {
            "num_cpus": run.cpus_per_client,
            "num_gpus": run.gpus_per_client,
        },
        "init_args": {
            "num_cpus": num_workers(run) * run.cpus_per_client,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        },
    }
