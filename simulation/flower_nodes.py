"""Start Flower's simulation runtime on Ray, and wait for its nodes.

Flower's private names are imported here and in `knnper.client.flower_node`, and nowhere
else. With ``KNNPER_PLAIN_FLOWER=1`` neither module uses them, with the same results.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import EventType
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from knnper.errors import RunError
from knnper.experiment import RunSettings
from knnper.process import huge_pages_for_workers, num_workers
from knnper.transport.flower_protocol import is_plain
from knnper.transport.messages import Purpose
from knnper.transport.polling import (
    MESSAGES_AT_ONCE,
    POLL_INTERVAL_S,
    Interrupted,
    NoReply,
    replies_in_order,
)

if not is_plain():
    from flwr.server.superlink.fleet.vce import vce_api
    from flwr.server.superlink.linkstate import InMemoryLinkState
    from flwr.simulation.run_simulation import _run_simulation

log = logging.getLogger(__name__)

# The first of these variables that is set names the folder of Ray's session.
_RAY_FOLDERS = ("RAY_TMPDIR", *["TMPDIR"] * (sys.platform == "linux"))

# The longest path of a socket in a session, and the system's limit, in bytes.
_SOCKET = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LONGEST_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
_REQUESTS_PER_WORKER = 4
_MOST_WORKERS = 1024

# Part of the error of `ray.init` if Ray takes more than 15 s to start, which no setting
# of Ray extends.
_RAY_TOO_SLOW = "timed out during startup"
NODES_CONNECT_TIMEOUT_S = 120.0


def run_nodes(
    client_app: ClientApp,
    num_nodes: int,
    run: RunSettings,
    lead: Callable[[Grid, threading.Event], T],
) -> T:
    """Start nodes on Ray, run the server, shut the nodes down.

    Any node can run any client. ``lead(grid, stop)`` is the server; it runs in a thread
    of this process and stops waiting when ``stop`` is set. Its result is returned.
    """
    require_cluster(run.ray_address)
    outcome: list[T] = []
    failures: list[Exception] = []
    stop = threading.Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
        try:
            outcome.append(lead(grid, stop))
        except Exception as error:
            failures.append(error)
            raise

    silent = _silent_flower()
    faster = _faster_flower()
    with _stopping_on_interrupt(stop), silent, faster, huge_pages_for_workers():
        try:
            _simulate(num_nodes, client_app, server_app, _backend_config(run))
        except RuntimeError as error:
            if failures:  # an error of the server, which Flower raises unchanged
                raise
            raise RunError(_describe_failure(error, run)) from error
    if not outcome:
        raise RunError("Flower's simulation ended before the run did")
    return outcome[0]


def num_places(run: RunSettings) -> int:
    """Return the number of clients that can run at the same time."""
    if is_plain() or not (run.ray_address or run.gpus_per_client):
        return num_workers(run)
    # The capacity of the cluster or the GPUs. Imported here, since a server of real
    # clients does not need Ray.
    from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

    places = {"num_cpus": run.cpus_per_client, "num_gpus": run.gpus_per_client}
    return pool_size_from_resources(places)


def requests_at_once(run: RunSettings) -> int:
    """Return the number of concurrent requests that keeps all workers busy."""
    return max(MESSAGES_AT_ONCE, _REQUESTS_PER_WORKER * num_places(run))


def _simulate(
    num_nodes: int,
    client_app: ClientApp,
    server_app: ServerApp,
    backend: dict[str, dict[str, Any]],
) -> None:
    if is_plain():
        run_simulation(server_app, client_app, num_nodes, backend_config=backend)
        return
    _run_simulation(
        num_supernodes=num_nodes,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        client_app=client_app,
        server_app=server_app,
        backend_config=backend,
    )


@contextlib.contextmanager
def _silent_flower() -> Iterator[None]:
    """Silence Flower's log: it would write a traceback of each error that it raises."""
    flower_log = logging.getLogger("flwr")
    before = flower_log.level
    flower_log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        flower_log.setLevel(before)


@contextlib.contextmanager
def _faster_flower() -> Iterator[None]:
    """Replace two parts of Flower's runtime that cost time."""
    if is_plain():
        yield
        return
    # Flower needs one thread for each worker: with a pool of the default size (at most
    # 32 threads), further workers never get a task. And it scans all messages for each
    # node ten times a second: an empty round of ten clients takes 0.1 s instead of
    # 0.02 s.
    pool = functools.partial(ThreadPoolExecutor, max_workers=_MOST_WORKERS)
    with (
        mock.patch.object(vce_api, "ThreadPoolExecutor", pool),
        mock.patch.object(vce_api, "add_messages_to_queue", _hand_on_messages),
    ):
        yield


def _hand_on_messages(
    state: InMemoryLinkState,
    queue: Queue[Message],
    nodes_mapping: Mapping[int, int],  # noqa: ARG001 (the signature is Flower's)
    f_stop: threading.Event,
) -> None:
    """Put each new message into the workers' queue, until ``f_stop`` is set."""
    while not f_stop.wait(POLL_INTERVAL_S):
        with state.lock:
            stored = state.message_ins_store.values()
            new = [message for message in stored if not message.metadata.delivered_at]
            for message in new:
                message.metadata.delivered_at = datetime.now(UTC).isoformat()
        for message in new:
            queue.put(message)


def _describe_failure(error: BaseException, run: RunSettings) -> str:
    # Flower's errors hold the reason in their cause.
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    reason = str(error).rstrip(".")
    if _RAY_TOO_SLOW in reason:
        return (
            "Ray, which runs the clients, did not start in time, most likely because "
            "the machine is too busy. Try again later, end other programs, or use "
            f"--engine serial, which has the same results. Ray's error: {reason}"
        )
    needs = "has what run.cpus_per_client and run.gpus_per_client ask for"
    check = f"the machine {needs}"
    if run.ray_address:
        check = (
            f"the Ray cluster at {run.ray_address} is of this version of Ray, and that "
            f"one of its machines {needs}"
        )
    return f"Flower's simulation failed: {reason}. Check that {check}"


def require_cluster(address: str | None) -> None:
    """Check that something listens at a cluster's address; Ray would retry for ever."""
    host, _, port = (address or "").rpartition(":")
    if "/" in host or not (host and port.isdigit()):
        return
    place = (host.strip("[]"), int(port))
    try:
        socket.create_connection(place, CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"found nothing at {address} ({error}), expected the head of a Ray "
            "cluster. Start one with `ray start --head`, which prints its address, or "
            "correct run.ray_address"
        ) from error


@contextlib.contextmanager
def _stopping_on_interrupt(stop: threading.Event) -> Iterator[None]:
    """Stop the server in order on Ctrl-C, then raise `KeyboardInterrupt`.

    Otherwise Flower's threads would wait for Ray for ever. A second Ctrl-C interrupts
    at once.
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


def _backend_config(run: RunSettings) -> dict[str, dict[str, Any]]:
    # "local": do not join a cluster that happens to run on this machine.
    cluster: dict[str, Any] = {"address": run.ray_address or "local"}
    if not run.ray_address:
        cluster["num_cpus"] = num_workers(run) * run.cpus_per_client
        if (folder := short_ray_folder()) is not None:
            cluster["_temp_dir"] = str(folder)
    return {
        "client_resources": {
            "num_cpus": run.cpus_per_client,
            "num_gpus": run.gpus_per_client,
        },
        "init_args": {
            **cluster,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        },
    }


def short_ray_folder(short: Path = Path("/tmp")) -> Path | None:
    """Return a folder for Ray's session if its default is too long, else None.

    Ray uses ``TMPDIR`` and fails if the paths of its sockets exceed the system's limit.
    Then the session is below ``short``. Raises RunError if that is not writable.
    """
    variable = next((name for name in _RAY_FOLDERS if name in os.environ), None)
    if variable is None:
        return None
    folder = os.environ[variable]
    longest = _LONGEST_SOCKET_PATH - len(os.fsencode(f"/{_SOCKET}"))
    length = len(os.fsencode(folder))
    if length <= longest:
        return None
    problem = (
        f"found {variable} = {folder} of {length} bytes, expected at most {longest}: "
        "Ray keeps sockets below it, and the system limits the length of their paths"
    )
    if not os.access(short, os.W_OK | os.X_OK):
        raise RunError(f"{problem}. Set RAY_TMPDIR to a folder with a shorter path")
    log.warning(
        "%s. Ray's files are in %s instead; set RAY_TMPDIR to choose another folder",
        problem,
        short / "ray",
    )
    return short / "ray"


def wait_for_nodes(grid: Grid, stop: threading.Event, num_asked: int) -> list[int]:
    """Wait until all nodes are registered and some have answered; return their ids.

    Nodes register while the ServerApp already runs. Each node knows the total number,
    so that the first round does not start with a part of them. A worker imports for
    seconds before its first answer, so ``num_asked`` nodes, one for each local worker,
    are asked at once.
    """
    deadline = time.monotonic() + NODES_CONNECT_TIMEOUT_S
    expected = 0
    while time.monotonic() < deadline:
        if stop.is_set():
            raise Interrupted("stopped while waiting for nodes")
        nodes = sorted(grid.get_node_ids())
        if nodes and not expected:
            expected = _num_expected(grid, nodes[:num_asked], stop)
        if expected and len(nodes) >= expected:
            return nodes
        time.sleep(POLL_INTERVAL_S)
    raise RunError(
        f"expected {expected or 'at least one'} nodes within "
        f"{NODES_CONNECT_TIMEOUT_S:.0f} s, found {len(nodes)}; check that the "
        "simulation's nodes are running"
    )


def in_turn(nodes: Sequence[int]) -> Callable[[str], int]:
    """Return a function that cycles through the nodes, for any client.

    Flower gives each node one message at a time, so the messages must be spread.
    """
    endless = itertools.cycle(nodes)
    return lambda client: next(endless)  # noqa: ARG005 (any client)


def _num_expected(grid: Grid, nodes: Sequence[int], stop: threading.Event) -> int:
    kind = Purpose.INTRODUCE.value
    queries = [Message(RecordDict(), node, kind) for node in nodes]
    for reply in replies_in_order(grid, queries, stop):
        if isinstance(reply, NoReply):
            raise RunError(f"a node did not introduce itself: {reply.reason}")
        if reply.has_error():
            raise RunError(f"a node did not introduce itself: {reply.error.reason}")
        num_nodes = reply.content.config_records["node"]["num-partitions"]
    return int(str(num_nodes))
