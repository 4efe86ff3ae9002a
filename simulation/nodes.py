"""The nodes of a simulation, each of which can play any virtual client."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from knnper.config.errors import RunError
from knnper.transport.messages import Purpose
from knnper.transport.polling import (
    POLL_INTERVAL_S,
    Interrupted,
    NoReply,
    replies_in_order,
)

CONNECT_TIMEOUT_S = 120.0


def wait_for_nodes(
    grid: Grid, stop: threading.Event, timeout_s: float = CONNECT_TIMEOUT_S
) -> list[int]:
    """Return the ids of all nodes, once all are there and one of them has answered.

    Nodes register while the ServerApp already runs. Any of them knows how many there
    are to be, so that the first round does not start with a part of them.

    Raises
    ------
    RunError
        If they are not all there in time.
    """
    deadline = time.monotonic() + timeout_s
    expected = 0
    while time.monotonic() < deadline:
        if stop.is_set():
            raise Interrupted("stopped while waiting for nodes")
        nodes = sorted(grid.get_node_ids())
        if nodes and not expected:
            expected = _num_expected(grid, nodes[0], stop)
        if expected and len(nodes) >= expected:
            return nodes
        time.sleep(POLL_INTERVAL_S)
    raise RunError(
        f"expected {expected or 'at least one'} nodes within {timeout_s:.0f} s, found "
        f"{len(nodes)}; check that the simulation's nodes are running"
    )


def in_turn(nodes: Sequence[int]) -> Callable[[str], int]:
    """Return what chooses the nodes one after the other, whoever is to be played.

    Flower hands each node one message at a time, so that a node that is given several
    holds them up; and who plays a client makes no difference to the outcome.
    """
    endless = itertools.cycle(nodes)
    return lambda client: next(endless)  # noqa: ARG005 (whoever it is)


def _num_expected(grid: Grid, node: int, stop: threading.Event) -> int:
    query = Message(
        content=RecordDict(), dst_node_id=node, message_type=Purpose.INTRODUCE.value
    )
    (reply,) = replies_in_order(grid, [query], stop)
    if isinstance(reply, NoReply):
        raise RunError(f"a node did not introduce itself: {reply.reason}")
    if reply.has_error():
        raise RunError(f"a node did not introduce itself: {reply.error.reason}")
    return int(str(reply.content.config_records["node"]["num-partitions"]))
