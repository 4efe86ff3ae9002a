"""Flower's simulation runtime, driven in this process.

The only place that knows private parts of Flower: its public entry point takes no
settings of the run and logs that it is deprecated. The version of Flower is pinned for
it, and tests run it.
"""

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from queue import Queue
from types import FrameType
from typing import TypeVar
from unittest import mock

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common import EventType
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend.backend import BackendConfig
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.serverapp import Grid, ServerApp
from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources
from flwr.simulation.run_simulation import _run_simulation

from knnper.config.errors import RunError
from knnper.config.sections import RunSettings
from knnper.machine import num_workers
from knnper.transport.polling import MESSAGES_AT_ONCE, POLL_INTERVAL_S, Interrupted

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0

_REQUESTS_PER_WORKER = 4
_MOST_WORKERS = 1024
# In the error of `ray.init` after a part of Ray was not up in 15 s. No setting of Ray
# gives it more.
_RAY_TOO_SLOW = "timed out during startup"


def play(
    client_app: ClientApp,
    num_nodes: int,
    run: RunSettings,
    lead: Callable[[Grid, threading.Event], T],
) -> T:
    """Start nodes on Ray, lead them, shut them down.

    Parameters
    ----------
    client_app
        What the nodes run.
    num_nodes
        How many there are; any of them can play any client.
    run
        What they may use.
    lead
        ``(grid, stop) -> T``: what the server does, in a thread of this process. It
        gives up waiting when ``stop`` is set.

    Returns
    -------
    T
        What ``lead`` returned.

    Raises
    ------
    RunError
        If Flower ended without an answer from ``lead``, or there is no cluster to join.
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

    # Flower logs an error with all its tracebacks, and raises it.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    with _stopping_on_interrupt(stop), _faster_flower(), _huge_pages_for_workers():
        try:
            _run_simulation(
                num_supernodes=num_nodes,
                exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                client_app=client_app,
                server_app=server_app,
                backend_config=_backend_config(run),
            )
        except RuntimeError as error:
            if failures:  # the server's own; Flower raises it as it is
                raise
            raise RunError(_why(error, run)) from error
    if not outcome:
        raise RunError("Flower's simulation ended before the run did")
    return outcome[0]


def requests_at_once(run: RunSettings) -> int:
    """Return how many requests keep all workers busy at any time.

    How many workers a cluster has room for is known once `play` has joined it.
    """
    workers = num_workers(run)
    if run.ray_address:
        places = {"num_cpus": run.cpus_per_client, "num_gpus": run.gpus_per_client}
        workers = pool_size_from_resources(places)
    return max(MESSAGES_AT_ONCE, _REQUESTS_PER_WORKER * workers)


@contextlib.contextmanager
def _faster_flower() -> Iterator[None]:
    """Replace two parts of Flower's runtime that cost time.

    It has a thread wait for each worker, in a pool of the default size: 32, or four
    more than there are cores; further workers never get a task. And ten times a second
    it looks, for each node, through all messages: a tenth of a second a round, and a
    part of a core that grows with their product.
    """
    pool = functools.partial(ThreadPoolExecutor, max_workers=_MOST_WORKERS)
    with (
        mock.patch.object(vce_api, "ThreadPoolExecutor", pool),
        mock.patch.object(vce_api, "add_messages_to_queue", _hand_on_messages),
    ):
        yield


@contextlib.contextmanager
def _huge_pages_for_workers() -> Iterator[None]:
    """Let glibc ask for huge pages in the processes that are started meanwhile.

    The large tensors of a training step take a twentieth less time. It is a setting of
    the environment because glibc reads it when a process starts.
    """
    before = os.environ.get("GLIBC_TUNABLES")
    tunables = [before] if before else []
    os.environ["GLIBC_TUNABLES"] = ":".join([*tunables, "glibc.malloc.hugetlb=1"])
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLIBC_TUNABLES"]
        else:
            os.environ["GLIBC_TUNABLES"] = before


def _hand_on_messages(
    state: InMemoryLinkState,
    queue: Queue[Message],
    nodes_mapping: Mapping[int, int],  # noqa: ARG001 (the signature is Flower's)
    f_stop: threading.Event,
) -> None:
    """Give each new message to whichever worker is free next, until the end."""
    while not f_stop.wait(POLL_INTERVAL_S):
        with state.lock:
            stored = state.message_ins_store.values()
            new = [message for message in stored if not message.metadata.delivered_at]
            for message in new:
                message.metadata.delivered_at = datetime.now(UTC).isoformat()
        for message in new:
            queue.put(message)


def _why(error: RuntimeError, run: RunSettings) -> str:
    reason = str(_beneath_flower(error)).rstrip(".")
    if _RAY_TOO_SLOW in reason:
        return (
            "Ray, whose processes play the clients, did not start in time, most likely "
            "because the machine is too busy. Try again when it is less so, end other "
            "programs, or do without Ray by --engine serial, which has the same "
            f"results. Ray says: {reason}"
        )
    needs = "has what run.cpus_per_client and run.gpus_per_client ask for"
    check = f"the machine {needs}"
    if run.ray_address:
        check = (
            f"the Ray cluster at {run.ray_address} is of this version of Ray, and that "
            f"one of its machines {needs}"
        )
    return f"Flower's simulation failed: {reason}. Check that {check}"


def _beneath_flower(error: BaseException) -> BaseException:
    """Return what was raised below Flower's errors, which only say that it was."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def require_cluster(address: str | None) -> None:
    """Check that something listens at a cluster's address: Ray asks for ever.

    Parameters
    ----------
    address
        As of `RunSettings.ray_address`; only ``HOST:PORT`` can be checked.

    Raises
    ------
    RunError
        If nothing does.
    """
    host, _, port = (address or "").rpartition(":")
    if "/" in host or not (host and port.isdigit()):
        return
    place = (host.strip("[]"), int(port))
    try:
        socket.create_connection(place, CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"found nothing at {address} ({error}), expected the head of a Ray "
            "cluster. Start one there with `ray start --head`, which says its address, "
            "or correct run.ray_address"
        ) from error


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


def _backend_config(run: RunSettings) -> BackendConfig:
    return {
        "client_resources": {
            "num_cpus": run.cpus_per_client,
            "num_gpus": run.gpus_per_client,
        },
        "init_args": {
            **_where(run),
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        },
    }


def _where(run: RunSettings) -> dict[str, str | float]:
    """Return the arguments of `ray.init` that join a cluster, or start one here."""
    if run.ray_address:
        return {"address": run.ray_address}
    return {"num_cpus": num_workers(run) * run.cpus_per_client}
