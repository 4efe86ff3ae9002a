"""Which Flower node is which client."""

import threading
import time
from collections.abc import Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from knnper.config.errors import RunError
from knnper.transport.polling import POLL_INTERVAL_S, Interrupted, replies_in_order

CONNECT_TIMEOUT_S = 120.0


def wait_for_nodes(
    grid: Grid, stop: threading.Event, timeout_s: float = CONNECT_TIMEOUT_S
) -> dict[int, ConfigRecord]:
    """Return what every node says of itself, by node id, once all are there.

    Nodes register while the ServerApp already runs; each says how many there are to
    be, so that the first round does not start with a part of them.

    Raises
    ------
    RunError
        If they are not all there in time.
    """
    deadline = time.monotonic() + timeout_s
    known: dict[int, ConfigRecord] = {}
    while time.monotonic() < deadline:
        if stop.is_set():
            raise Interrupted("stopped while waiting for nodes")
        new = [node for node in grid.get_node_ids() if node not in known]
        known.update(_introductions(grid, new, stop))
        if known and len(known) >= _num_expected(known):
            return known
        time.sleep(POLL_INTERVAL_S)
    expected = _num_expected(known) if known else 1
    raise RunError(
        f"expected {expected} nodes within {timeout_s:.0f} s, found {len(known)}; "
        "check that the simulation's nodes or the SuperNodes are running"
    )


def assign_nodes(
    clients: Sequence[str], nodes: dict[int, ConfigRecord]
) -> dict[str, int]:
    """Return the node that plays each virtual client.

    With as many nodes as clients each node plays the one of its partition; with fewer,
    clients share nodes in turn, and the outcome is the same.
    """
    ordered = sorted(nodes, key=lambda node: int(str(nodes[node]["partition-id"])))
    return {name: ordered[i % len(ordered)] for i, name in enumerate(clients)}


def _introductions(
    grid: Grid, nodes: Sequence[int], stop: threading.Event
) -> dict[int, ConfigRecord]:
    queries = (
        Message(content=RecordDict(), dst_node_id=node, message_type="query")
        for node in nodes
    )
    replies = list(replies_in_order(grid, queries, stop))
    for reply in replies:
        if reply.has_error():
            raise RunError(f"a node did not introduce itself: {reply.error.reason}")
    return {
        reply.metadata.src_node_id: reply.content.config_records["node"]
        for reply in replies
    }


def _num_expected(known: dict[int, ConfigRecord]) -> int:
    return max(int(str(said["num-partitions"])) for said in known.values())
