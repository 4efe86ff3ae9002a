"""Flower's simulation runtime, driven in this process.

The only place that knows a private entry point of Flower: the public one takes no
settings of the run and logs that it is deprecated. The version of Flower is pinned for
it, and a test runs it.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
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
from knnper.transport.polling import Interrupted
from server.federation import Federation
from server.flower_federation import FlowerFederation
from server.nodes import assign_nodes, wait_for_nodes
from simulation.client_runtime import client_app
from simulation.workbench import Workbench

T = TypeVar("T")


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
    failures: list[Exception] = []
    stop = threading.Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        try:
            clients = flower_federation(grid, bench, run_folder, shared, stop)
            outcome.append(body(clients))
        except Exception as error:
            failures.append(error)
            raise

    logging.getLogger("flwr").setLevel(logging.ERROR)
    with shared_memory.shared_folder() as shared, _stopping_on_interrupt(stop):
        try:
            _start_flower(bench, server_app)
        except RuntimeError as error:
            if failures:  # the server's own; Flower raises it as it is
                raise
            raise RunError(
                f"Flower's simulation failed: {error.__cause__ or error}. Check that "
                "the machine has what run.cpus_per_client and run.gpus_per_client ask "
                "for"
            ) from error
    if not outcome:
        raise RunError("Flower's simulation ended before the run did")
    return outcome[0]


def _start_flower(bench: Workbench, server_app: ServerApp) -> None:
    _run_simulation(
        num_supernodes=len(bench.clients.parts),
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app=client_app,
        server_app=server_app,
        backend_config=_backend_config(bench.experiment.run),
    )


@contextlib.contextmanager
def _stopping_on_interrupt(stop: threading.Event) -> Iterator[None]:
    """Turn Ctrl-C into an orderly end, then into the `KeyboardInterrupt` it means.

    An interrupt in the middle of Flower's engine leaves its threads waiting for Ray for
    ever. So the server is told to stop, and Flower ends as after any other error; a
    second Ctrl-C interrupts at once. Only a main thread can be interrupted at all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupted(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    except Interrupted as error:
        raise KeyboardInterrupt from error
    finally:
        stop.set()
        signal.signal(signal.SIGINT, before)


def flower_federation(
    grid: Grid,
    bench: Workbench,
    run_folder: Path,
    shared_folder: Path | None,
    stop: threading.Event,
) -> Federation:
    """Return the virtual clients behind ``grid``, once all its nodes are there.

    Parameters
    ----------
    grid
        Flower's grid.
    bench
        The experiment.
    run_folder
        Where clients keep their state.
    shared_folder
        Where models travel as files in memory; None sends them in messages.
    stop
        Ends waiting for clients when it is set.
    """
    nodes = wait_for_nodes(grid, stop)
    return FlowerFederation(
        grid=grid,
        node_of=assign_nodes(bench.clients.names(), nodes),
        update_type=bench.method.update_type,
        experiment=to_json(bench.experiment),
        run_folder=str(run_folder.resolve()),
        shared_folder=str(shared_folder or ""),
        stop=stop,
    )


def num_workers(run: RunSettings) -> int:
    """Return the number of worker processes: as set, or one a usable CPU core."""
    if run.num_workers:
        return run.num_workers
    if hasattr(os, "sched_getaffinity"):  # not everywhere, as on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
