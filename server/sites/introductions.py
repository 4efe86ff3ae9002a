"""Who is behind a node: what it is asked, and what it says."""

import threading
from collections.abc import Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from knnper.transport.introduction import Introduction, read_introduction
from knnper.transport.messages import Job, Purpose, to_content
from knnper.transport.polling import NoReply, Patience, replies_in_order

TIMEOUT_S = 120.0
"""A site may have to read all of its data for the first time."""

OVER_NETWORK = Patience(
    timeout_s=TIMEOUT_S,
    longest_interval_s=0.5,
    looks_for_the_first=1,
    may_be_away=True,
)
"""How replies of clients on machines of their own are waited for."""


def introductions(
    grid: Grid, nodes: Sequence[int], experiment: str, stop: threading.Event
) -> Mapping[int, Introduction | NoReply]:
    """Ask nodes who they are, all at once; return what each says.

    Parameters
    ----------
    grid
        Flower's grid.
    nodes
        Their ids.
    experiment
        The experiment as JSON: a site looks whether its data fits.
    stop
        Ends waiting when it is set.
    """
    job = Job(clients=[], server_round=0, keep_round=0, experiment=experiment)
    questions = [
        Message(
            content=to_content(job, {}),
            dst_node_id=node,
            message_type=Purpose.INTRODUCE.value,
            ttl=TIMEOUT_S,
        )
        for node in nodes
    ]
    replies = replies_in_order(grid, questions, stop, patience=OVER_NETWORK)
    return {
        node: _introduction(reply) for node, reply in zip(nodes, replies, strict=True)
    }


def _introduction(reply: Message | NoReply) -> Introduction | NoReply:
    if isinstance(reply, NoReply):
        return reply
    if reply.has_error():
        return NoReply(reply.error.reason or "no reason was given")
    return read_introduction(reply.content)
