"""The nodes of real clients by name: which are online, and which may take part."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from knnper.audit_log import Recorder, record_nothing
from knnper.errors import printable
from knnper.server.link.authorized import Registered
from knnper.server.roster import Member
from knnper.transport.messages import (
    Introduction,
    Job,
    Purpose,
    read_introduction,
    to_content,
)
from knnper.transport.polling import NoReply, push

# Until a node must introduce itself: it may first have to read all of its data.
TIMEOUT_S = 120.0
ASK_AGAIN_S = 20.0  # until a node that could not take part is asked again
REMIND_S = 300.0  # until the reason is repeated to a node that cannot take part

log = logging.getLogger("flwr")


def _objection(roster: Mapping[str, Registered], node: int, name: str) -> str:
    """Return why ``node`` may not use ``name``; empty if it may."""
    registered = roster.get(str(node))
    if not roster or (registered is not None and registered.name == name):
        return ""
    if registered is None:
        return f"its key is not registered under any name, and it calls itself {name}"
    return (
        f"its key is registered as {registered.name}, and it calls itself {name}; set "
        f"name: {registered.name} in its configuration, or use the key of {name}"
    )


@dataclass
class Directory:
    """The nodes of clients, by the clients' names.

    ``record`` gets the nodes that cannot take part, for an audit log.
    """

    grid: Grid
    experiment: str
    # Registered clients by node; empty without authentication.
    roster: Callable[[], Mapping[str, Registered]]
    record: Recorder = record_nothing
    _asked: dict[str, tuple[int, float]] = field(default_factory=dict)  # by message
    _connected: set[int] = field(default_factory=set)
    _members: dict[int, Member] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)
    _ask_at: dict[int, float] = field(default_factory=dict)
    _remind_at: dict[int, float] = field(default_factory=dict)

    def refresh(self) -> None:
        """Update the connected nodes, and ask new nodes to introduce themselves."""
        self._connected = set(self.grid.get_node_ids())
        for node, answer in self._answers():
            problem = self._admit(node, answer)
            if problem:
                self._turn_away(node, problem)
        now = time.monotonic()
        for node in sorted(self._connected - set(self._members) - self._silent()):
            if self._ask_at.get(node, now) > now:
                continue
            job = to_content(Job([], 0, [], self.experiment), {})
            question = Message(job, node, Purpose.INTRODUCE.value, ttl=TIMEOUT_S)
            for message_id in push(self.grid, [question]):
                if message_id:  # a node that has just left is asked when it returns
                    self._asked[message_id] = (node, now)

    def _silent(self) -> set[int]:
        return {node for node, _ in self._asked.values()}

    def _answers(self) -> Iterator[tuple[int, Introduction | NoReply]]:
        if self._asked:
            for reply in self.grid.pull_messages(list(self._asked)):
                question = self._asked.pop(reply.metadata.reply_to_message_id, None)
                if question is not None and reply.has_error():
                    why = printable(reply.error.reason or "no reason was given")
                    yield question[0], NoReply(why)
                elif question is not None:
                    yield question[0], read_introduction(reply.content)
        now = time.monotonic()
        for message_id, (node, asked_at) in list(self._asked.items()):
            if now - asked_at > TIMEOUT_S:
                del self._asked[message_id]
                yield node, NoReply(f"no answer within {TIMEOUT_S:g} s")

    def registered(self) -> set[str]:
        """Return the names of registered clients."""
        return {client.name for client in self.roster().values()}

    def is_silent(self, client: str) -> bool:
        """Return whether a client's node is connected and has not introduced itself."""
        silent, roster = self._connected & self._silent(), self.roster()
        entries = (roster.get(str(node)) for node in silent)
        return any(entry is not None and entry.name == client for entry in entries)

    def members(self) -> dict[str, Member]:
        """Return the connected clients by name, as of the last `refresh`."""
        connected = self._connected & set(self._members)
        members = [self._members[node] for node in connected]
        return {member.name: member for member in members}

    def node_of(self, client: str) -> int | None:
        """Return the node of a connected client, or None."""
        for node in self._connected & set(self._members):
            if self._members[node].name == client:
                return node
        return None

    def refused(self) -> Iterable[str]:
        """Return the reasons why connected nodes do not take part."""
        nodes = self._refused.keys() & self._connected
        return [reason for node, reason in self._refused.items() if node in nodes]

    def _admit(self, node: int, introduction: Introduction | NoReply) -> str:
        """Admit a node; return the reason if it cannot take part, or empty."""
        if isinstance(introduction, NoReply):
            return f"node {node} did not introduce itself: {introduction.reason}"
        title = f"client {introduction.name or 'without a name'} (node {node})"
        if introduction.problem:
            return f"{title} cannot take part: {introduction.problem}"
        roster = self.roster()
        objection = _objection(roster, node, introduction.name)
        if objection:
            return f"{title} is refused: {objection}"
        other = self.node_of(introduction.name)
        if other is not None:
            return (
                f"{title} is refused: the name is taken by node {other}, which is "
                "connected"
            )
        if introduction.remark:
            log.warning("client %s: %s", introduction.name, introduction.remark)
        num_train = introduction.num_train
        fixed = roster[str(node)].num_train if roster else None
        if fixed is not None and num_train != fixed:
            warning = "%s reports %d training examples; the operator fixed %d"
            log.warning(warning, title, num_train, fixed)
            # A client without data does not train, whatever number is fixed.
            num_train = fixed if num_train else 0
        self._members[node] = Member(
            name=introduction.name,
            seen=introduction.train,
            num_train=num_train,
            num_validation=introduction.num_validation,
            num_test=introduction.num_test,
            is_claim=fixed is None,
        )
        self._refused.pop(node, None)
        return ""

    def _turn_away(self, node: int, reason: str) -> None:
        now = time.monotonic()
        self._ask_at[node] = now + ASK_AGAIN_S
        if self._refused.get(node) == reason and now < self._remind_at[node]:
            return
        if self._refused.get(node) != reason:
            self.record("client_refused", node=str(node), reason=reason)
        self._refused[node] = reason
        self._remind_at[node] = now + REMIND_S
        log.warning("%s", reason)
        # For the node's own log; no reply is expected.
        content = RecordDict({"refusal": ConfigRecord({"reason": reason})})
        push(self.grid, [Message(content, node, Purpose.REFUSE.value)])
