"""An experiment's clients, played by nodes of Flower's simulation."""

import threading
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

from flwr.serverapp import Grid

from knnper.config.document import to_json
from knnper.config.errors import RunError
from knnper.config.sections import RunSettings
from knnper.durable_files import write_atomically
from knnper.transport import shared_memory
from server.federation import Federation
from server.flower_federation import FlowerFederation
from simulation.client_runtime import SESSION_FILE, client_app
from simulation.flower_runtime import play, requests_at_once
from simulation.nodes import in_turn, wait_for_nodes
from simulation.workbench import Workbench

T = TypeVar("T")

NUM_NODES = 64
"""Flower's nodes at most. Which of them plays a client makes no difference."""


def run_on_flower(
    bench: Workbench, run_folder: Path, body: Callable[[Federation], T]
) -> T:
    """Start the virtual clients on Ray, lead them with ``body``, shut them down.

    There are `NUM_NODES` nodes at most: clients that wait for their turn cost nothing.

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
    run = bench.experiment.run
    num_nodes = min(len(bench.clients.parts), NUM_NODES)
    with carrier_folder(run) as folder:

        def lead(grid: Grid, stop: threading.Event) -> T:
            return body(flower_federation(grid, bench, run_folder, folder, stop))

        return play(client_app, num_nodes, run, lead)


def carrier_folder(run: RunSettings) -> AbstractContextManager[Path | None]:
    """Return the folder in memory in which models travel; None if in messages.

    Raises
    ------
    RunError
        If shared memory is asked for and there is none, or too little.
    """
    if run.carrier == "message" or (run.carrier == "auto" and run.ray_address):
        return nullcontext()
    if run.carrier == "shared_memory" and not shared_memory.is_available():
        raise RunError(
            "run.carrier is shared_memory, and "
            f"{shared_memory.MEMORY_FILE_SYSTEM} is missing or has less than "
            f"{shared_memory.LEAST_FREE_BYTES >> 20} MiB free. Make it larger "
            "(--shm-size in a container), or set run.carrier to auto"
        )
    return shared_memory.shared_folder()


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
    session = uuid.uuid4().hex
    write_atomically(run_folder / SESSION_FILE, session)
    return FlowerFederation(
        grid=grid,
        choose_node=in_turn(wait_for_nodes(grid, stop)),
        update_type=bench.method.update_type,
        experiment=to_json(bench.experiment),
        run_folder=str(run_folder.resolve()),
        shared_folder=str(shared_folder or ""),
        session=session,
        at_once=requests_at_once(bench.experiment.run),
        stop=stop,
    )
