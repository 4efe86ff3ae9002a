"""Who is behind a node: what it is asked, and what it says."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from knnper.transport.foreign_text import printable
from knnper.transport.introduction import Introduction, read_introduction
from knnper.transport.messages import Job, Purpose, to_content
from knnper.transport.polling import NoReply

TIMEOUT_S = 120.0
"""A site may have to read all of its data for the first time, or be busy."""


@dataclass
class Introductions:
    """Asks nodes who they are, and never waits for what they say.

    Attributes
    ----------
    grid
        Flower's grid.
    experiment
        The experiment as JSON: a site looks whether its data fits.
    """

    grid: Grid
    experiment: str
    _asked: dict[str, tuple[int, float]] = field(default_factory=dict)

    def outstanding(self) -> frozenset[int]:
        """Return the nodes that were asked and have not answered yet."""
        return frozenset(node for node, _ in self._asked.values())

    def ask(self, nodes: Collection[int]) -> None:
        """Ask nodes who they are."""
        job = Job([], server_round=0, keep_rounds=[], experiment=self.experiment)
        for node in nodes:
            question = Message(
                content=to_content(job, {}),
                dst_node_id=node,
                message_type=Purpose.INTRODUCE.value,
                ttl=TIMEOUT_S,
            )
            for message_id in self.grid.push_messages([question]):
                if message_id:  # a node that has just left is asked when it is back
                    self._asked[message_id] = (node, time.monotonic())

    def answers(self) -> Iterator[tuple[int, Introduction | NoReply]]:
        """Yield what nodes have said since the last look, each with its id."""
        if self._asked:
            for reply in self.grid.pull_messages(list(self._asked)):
                asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
                if asked is not None:
                    yield asked[0], _introduction(reply)
        now = time.monotonic()
        late = {
            message_id: node
            for message_id, (node, asked_at) in self._asked.items()
            if now - asked_at > TIMEOUT_S
        }
        for message_id, node in late.items():
            del self._asked[message_id]
            yield node, NoReply(f"no answer within {TIMEOUT_S:g} s")


def _introduction(reply: Message) -> Introduction | NoReply:
    if reply.has_error():
        return NoReply(printable(reply.error.reason or "no reason was given"))
    return read_introduction(reply.content)
