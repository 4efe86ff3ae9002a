"""An experiment's clients as nodes of Flower's simulation.

What Flower keeps to itself is imported here and in `knnper.client.flower_node`, and
nowhere else. With ``KNNPER_PLAIN_FLOWER=1`` none of it is, with the same results.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import EventType
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from numpy.typing import NDArray
from torch import Tensor

from knnper.client.client_app import make_client_app
from knnper.client.runtime import ClientRuntime
from knnper.errors import KnnPerError, OwnCodeError, RunError
from knnper.experiment import RunSettings, from_json, to_json
from knnper.files import write_atomically
from knnper.process import compute_device, huge_pages_for_workers, num_workers
from knnper.server.federation import Federation, FlowerFederation, TaskSize
from knnper.simulation.workbench import (
    Workbench,
    experiment_catalogue,
    open_workbench,
    runtime_of,
)
from knnper.strategies.core.records import NoState
from knnper.transport import messages as shared_memory
from knnper.transport.flower_protocol import is_plain
from knnper.transport.messages import (
    IN_MESSAGE,
    VECTOR,
    CannotRunError,
    Carrier,
    Files,
    Job,
    Packed,
    Purpose,
    copied,
    is_run_folder,
    too_large,
)
from knnper.transport.polling import (
    MESSAGES_AT_ONCE,
    POLL_INTERVAL_S,
    Interrupted,
    NoReply,
    replies_in_order,
)

if TYPE_CHECKING:
    from ray import ObjectRef

if not is_plain():
    from flwr.server.superlink.fleet.vce import vce_api
    from flwr.server.superlink.linkstate import InMemoryLinkState
    from flwr.simulation.run_simulation import _run_simulation

log = logging.getLogger(__name__)
SESSION_FILE = ".session"
# Ray keeps a session in the folder that the first of these variables names.
_RAY_FOLDERS = ("RAY_TMPDIR", *["TMPDIR"] * (sys.platform == "linux"))
# The socket of a session with the longest path, and the longest path of a socket that
# the system takes, in bytes.
_SOCKET = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LONGEST_SOCKET_PATH = 103 if sys.platform == "darwin" else 107


@functools.lru_cache(maxsize=1)
def _resident_runtime(experiment: str, run_folder: str, session: str) -> ClientRuntime:
    """Return this process's runtime; data, model and method are made once."""
    settings = from_json(experiment, experiment_catalogue())
    bench = open_workbench(settings, compute_device(settings.run))
    if bench.method.client_state_type is not NoState or settings.run.save_predictions:
        require_same_folder(Path(run_folder), session)
    return runtime_of(bench, Path(run_folder))


def require_same_folder(run_folder: Path, session: str) -> None:
    """Refuse to keep what clients write where other machines would not find it."""
    path = run_folder / SESSION_FILE
    if not path.exists() or path.read_text() != session:
        raise RunError(
            f"{run_folder} is not the run's folder here. Clients of this run write "
            "there what they keep, so every machine must see it under this path: give "
            "--output on a file system that all of them share"
        )


class VirtualNode:
    """A node of a simulation: it can run any virtual client."""

    def open(self, context: Context, job: Job) -> ClientRuntime:  # noqa: ARG002
        """See `knnper.client.client_app.Node`."""
        try:
            return _resident_runtime(job.experiment, job.run_folder, job.session)
        except (KnnPerError, OSError) as error:
            raise CannotRunError(str(error)) from error

    def carrier(self, context: Context, job: Job) -> Carrier:  # noqa: ARG002
        """See `knnper.client.client_app.Node`: a folder in memory, if in any."""
        if job.shared_folder == ObjectStore.name:
            return ObjectStore(shares=False)
        folder = Path(job.shared_folder)
        return Files(folder) if is_run_folder(folder) else IN_MESSAGE

    def introduce(self, context: Context, job: Job | None) -> RecordDict:  # noqa: ARG002
        """Return which node of how many this one is."""
        names = ("partition-id", "num-partitions")
        node = ConfigRecord({name: context.node_config[name] for name in names})
        return RecordDict({"node": node})

    def refused(self, context: Context, reason: str) -> None:  # noqa: ARG002
        """Refuse to be refused: every node of a simulation takes part."""
        raise RunError(f"a node of a simulation was refused: {reason}")

    def failed(self, message: Message, context: Context, error: Exception) -> Message:  # noqa: ARG002
        """Raise the error: clients, server and user are on the same side."""
        # What fails in users' code fails for all clients.
        if isinstance(error, OwnCodeError):
            raise CannotRunError(str(error)) from error
        raise error


class _Numbers(Array):
    """A float32 vector that Ray carries beside a message, or a reference to one."""

    # Flower hands messages on to Ray as objects, which its documentation does not
    # promise; numbers that it left out would be missed by whoever reads them. Ray finds
    # arrays and references in a message by itself. An array goes into its store as it
    # is, neither saved nor pickled. A reference is counted: what it refers to lives as
    # long as there is one, and no longer. With 100 clients and 9 MB, on two nodes, a
    # round that only moves models takes 1.1 s so, and 2.8 s with them in messages.

    def __init__(self, held: NDArray[np.float32] | ObjectRef[Any], length: int) -> None:
        super().__init__("float32", (length,), "ray", b"")
        self.held = held

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.held, *self.shape)


def _arrived(held: NDArray[np.float32] | ObjectRef[Any], length: int) -> _Numbers:
    # Copied at once: as long as there is a view, the store keeps what is viewed.
    if isinstance(held, np.ndarray):
        held = copied(held).numpy()
    return _Numbers(held, length)


class ObjectStore(Carrier):
    """Numbers in Ray's object store, by which they get to all machines of a cluster.

    Parameters
    ----------
    shares
        Whether many read what is put: then a message holds a reference, and each
        machine fetches the numbers once. A reply, which one process reads, goes into
        the store with the message; so it is there even if its worker has died since.
    """

    name = "object_store"

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares

    def put(self, vector: Tensor, entry: ConfigRecord) -> ArrayRecord:  # noqa: ARG002
        """See `Carrier.put`."""
        # It imports Ray, which a server of real clients does without.
        import ray

        numbers = vector.numpy()
        # A message is taken apart later, when a client's memory may be the next one's.
        held = ray.put(numbers) if self._shares else numbers.copy()
        record = ArrayRecord()
        record[VECTOR] = _Numbers(held, len(numbers))  # the constructor would copy it
        return record

    def place(self, packed: Packed) -> str | None:
        """See `Carrier.place`."""
        array = packed.array.get(VECTOR)
        if not isinstance(array, _Numbers) or isinstance(array.held, np.ndarray):
            return None
        return str(array.held.hex())

    def get(self, packed: Packed, most_bytes: float = math.inf) -> Tensor:
        """See `Carrier.get`."""
        array = packed.array.get(VECTOR)
        if not isinstance(array, _Numbers):
            return super().get(packed, most_bytes)
        if (found := 4 * array.shape[0]) > most_bytes:
            raise too_large(most_bytes, found)
        if isinstance(array.held, np.ndarray):
            return torch.from_numpy(array.held)
        import ray

        return copied(ray.get(array.held))


client_app = make_client_app(lambda _: VirtualNode())
T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
_REQUESTS_PER_WORKER = 4
_MOST_WORKERS = 1024

# In the error of `ray.init` after a part of Ray was not up in 15 s. No setting of Ray
# gives it more.
_RAY_TOO_SLOW = "timed out during startup"


def run_nodes(
    client_app: ClientApp,
    num_nodes: int,
    run: RunSettings,
    lead: Callable[[Grid, threading.Event], T],
) -> T:
    """Start nodes on Ray, lead them, shut them down; return what ``lead`` returned.

    Any of the nodes can run any client. ``lead(grid, stop)`` is what the server does,
    in a thread of this process; it gives up waiting when ``stop`` is set.
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

    silent, faster = _silent_flower(), _faster_flower()
    with _stopping_on_interrupt(stop), silent, faster, huge_pages_for_workers():
        try:
            _simulate(num_nodes, client_app, server_app, _backend_config(run))
        except RuntimeError as error:
            if failures:  # the server's own; Flower raises it as it is
                raise
            raise RunError(_why(error, run)) from error
    if not outcome:
        raise RunError("Flower's simulation ended before the run did")
    return outcome[0]


def num_places(run: RunSettings) -> int:
    """Return how many clients can be run at a time."""
    if is_plain() or not (run.ray_address or run.gpus_per_client):
        return num_workers(run)
    # How many a cluster, or its GPUs, have room for. It imports Ray, which a server of
    # real clients does without.
    from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

    places = {"num_cpus": run.cpus_per_client, "num_gpus": run.gpus_per_client}
    return pool_size_from_resources(places)


def requests_at_once(run: RunSettings) -> int:
    """Return how many requests keep all workers busy at any time."""
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
    """Let Flower log nothing: of an error it would all tracebacks, and raises it."""
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
    # One thread waits for each worker: in a pool of the default size, 32 or four more
    # than there are cores, further workers never get a task. Ten times a second Flower
    # looks, for each node, through all messages: an empty round of ten clients takes
    # 0.1 s then, instead of 0.02 s.
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
    """Give each new message to whichever worker is free next, until the end."""
    while not f_stop.wait(POLL_INTERVAL_S):
        with state.lock:
            stored = state.message_ins_store.values()
            new = [message for message in stored if not message.metadata.delivered_at]
            for message in new:
                message.metadata.delivered_at = datetime.now(UTC).isoformat()
        for message in new:
            queue.put(message)


def _why(error: BaseException, run: RunSettings) -> str:
    # Flower's errors only say that there is one below them.
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    reason = str(error).rstrip(".")
    if _RAY_TOO_SLOW in reason:
        return (
            "Ray, whose processes run the clients, did not start in time, most likely "
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


def require_cluster(address: str | None) -> None:
    """Check that something listens at a cluster's address: Ray asks for ever."""
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

    Else Flower's threads wait for Ray for ever. A second Ctrl-C interrupts at once.
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
    # Of `ray.init`: joins the cluster that is named, none that happens to run here.
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
    """Return a folder for Ray's session; None if its own choice will do.

    Ray takes ``TMPDIR``, and fails if the paths of its sockets get too long there. Its
    session is then below ``short``, if this process may write to that.
    """
    variable = next((name for name in _RAY_FOLDERS if name in os.environ), None)
    if variable is None:
        return None
    folder = os.environ[variable]
    longest = _LONGEST_SOCKET_PATH - len(os.fsencode(f"/{_SOCKET}"))
    length = len(os.fsencode(folder))
    if length <= longest:
        return None
    what = (
        f"found {variable} = {folder} of {length} bytes, expected at most {longest}: "
        "Ray keeps sockets below it, and the system limits the length of their paths"
    )
    if not os.access(short, os.W_OK | os.X_OK):
        raise RunError(f"{what}. Set RAY_TMPDIR to a folder with a shorter path")
    log.warning(
        "%s. Ray's files are in %s instead; set RAY_TMPDIR to choose another folder",
        *(what, short / "ray"),
    )
    return short / "ray"


NODES_CONNECT_TIMEOUT_S = 120.0


def wait_for_nodes(
    grid: Grid,
    stop: threading.Event,
    num_asked: int,
    timeout_s: float = NODES_CONNECT_TIMEOUT_S,
) -> list[int]:
    """Return the ids of all nodes, once all are there and some of them have answered.

    Nodes register while the ServerApp already runs. Any of them knows how many there
    are to be, so that the first round does not start with a part of them. A worker
    imports for seconds when it is first asked, so all are asked at once: as many
    nodes as there are workers here. Ray, which knows those elsewhere, may not be up.
    """
    deadline = time.monotonic() + timeout_s
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
        f"expected {expected or 'at least one'} nodes within {timeout_s:.0f} s, found "
        f"{len(nodes)}; check that the simulation's nodes are running"
    )


def in_turn(nodes: Sequence[int]) -> Callable[[str], int]:
    """Return what chooses the nodes one after the other, whoever is to be run.

    Flower hands each node one message at a time; one that has several holds them up.
    """
    endless = itertools.cycle(nodes)
    return lambda client: next(endless)  # noqa: ARG005 (whoever it is)


def _num_expected(grid: Grid, nodes: Sequence[int], stop: threading.Event) -> int:
    kind = Purpose.INTRODUCE.value
    queries = [Message(RecordDict(), node, kind) for node in nodes]
    for reply in replies_in_order(grid, queries, stop):
        if isinstance(reply, NoReply):
            raise RunError(f"a node did not introduce itself: {reply.reason}")
        if reply.has_error():
            raise RunError(f"a node did not introduce itself: {reply.error.reason}")
        found = reply.content.config_records["node"]["num-partitions"]
    return int(str(found))


# Flower's nodes at most. Which of them runs a client makes no difference.
NUM_NODES = 64


def run_on_flower(
    bench: Workbench, run_folder: Path, body: Callable[[Federation], T]
) -> T:
    """Start the virtual clients on Ray, lead them with ``body``, shut them down."""
    run = bench.experiment.run
    num_nodes = min(len(bench.clients.parts), NUM_NODES)
    with carrier_of(run) as carrier:

        def lead(grid: Grid, stop: threading.Event) -> T:
            return body(flower_federation(grid, bench, run_folder, carrier, stop))

        return run_nodes(client_app, num_nodes, run, lead)


@contextlib.contextmanager
def carrier_of(run: RunSettings) -> Iterator[Carrier]:
    """Give what carries the models of a run."""
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
    """Return the virtual clients behind ``grid``, once all its nodes are there."""
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
