"""Which client is behind which node, and who is there."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from knnper.transport.introduction import Introduction
from knnper.transport.messages import Purpose
from knnper.transport.polling import NoReply
from server.roster import Member
from server.sites.introductions import Introductions
from server.sites.registry import Registry

ASK_AGAIN_S = 20.0
"""After this time a node that could not take part is asked again."""

REMIND_S = 300.0
"""After this time a node that still cannot take part is told so again."""

log = logging.getLogger("flwr")


@dataclass
class Directory:
    """Clients by name, and the nodes behind which they are.

    Attributes
    ----------
    grid
        Flower's grid.
    experiment
        The experiment as JSON.
    read_registry
        Returns which names keys are registered under, now.
    """

    grid: Grid
    experiment: str
    read_registry: Callable[[], Registry]
    _connected: set[int] = field(default_factory=set)
    _members: dict[int, Member] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)
    _ask_at: dict[int, float] = field(default_factory=dict)
    _remind_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._introductions = Introductions(self.grid, self.experiment)

    def refresh(self) -> None:
        """Look who is there, and ask those who are new who they are.

        Nobody is waited for: what a node says is heard at a later look.
        """
        self._connected = set(self.grid.get_node_ids())
        for node, said in self._introductions.answers():
            problem = self._admit(node, said)
            if problem:
                self._turn_away(node, problem)
        now = time.monotonic()
        known = set(self._members) | self._introductions.outstanding()
        unknown = sorted(self._connected - known)
        self._introductions.ask(
            [node for node in unknown if self._ask_at.get(node, now) <= now]
        )

    def registered(self) -> set[str]:
        """Return the names that keys are registered under."""
        return set(self.read_registry().names.values())

    def is_silent(self, client: str) -> bool:
        """Return whether a client's node is connected and has not said who it is."""
        silent = self._connected & self._introductions.outstanding()
        names = self.read_registry().names
        return any(names.get(node) == client for node in silent)

    def members(self) -> dict[str, Member]:
        """Return the clients that are connected, by name, as of the last look."""
        connected = self._connected & set(self._members)
        found = [self._members[node] for node in connected]
        return {member.name: member for member in found}

    def node_of(self, client: str) -> int | None:
        """Return the node behind which a client is connected; None if it is not."""
        for node in self._connected & set(self._members):
            if self._members[node].name == client:
                return node
        return None

    def refused(self) -> Iterable[str]:
        """Return why connected nodes do not take part."""
        return [
            reason for node, reason in self._refused.items() if node in self._connected
        ]

    def _admit(self, node: int, said: Introduction | NoReply) -> str:
        """Take a node in; return why not, or nothing."""
        if isinstance(said, NoReply):
            return f"node {node} did not introduce itself: {said.reason}"
        who = f"client {said.name or 'without a name'} (node {node})"
        if said.problem:
            return f"{who} cannot take part: {said.problem}"
        objection = self.read_registry().objection(node, said.name)
        if objection:
            return f"{who} is refused: {objection}"
        other = self.node_of(said.name)
        if other is not None:
            return (
                f"{who} is refused: the name is taken by node {other}, which is "
                "connected; every client needs a name of its own"
            )
        if said.remark:
            log.warning("client %s: %s", said.name, said.remark)
        fixed = self.read_registry().num_train.get(said.name)
        if fixed is not None and said.num_train != fixed:
            log.warning(
                "%s has %d training examples as it says; the operator fixed %d",
                *(who, said.num_train, fixed),
            )
        self._members[node] = Member(
            name=said.name,
            seen=said.train,
            # One without data does not train, whatever is fixed.
            num_train=min(said.num_train, 1) * (fixed or said.num_train),
            num_validation=said.num_validation,
            num_test=said.num_test,
            is_claim=fixed is None,
        )
        self._refused.pop(node, None)
        return ""

    def _turn_away(self, node: int, reason: str) -> None:
        now = time.monotonic()
        self._ask_at[node] = now + ASK_AGAIN_S
        if self._refused.get(node) == reason and now < self._remind_at[node]:
            return
        self._refused[node] = reason
        self._remind_at[node] = now + REMIND_S
        log.warning("%s", reason)
        # That the node's own log says it too; nobody waits for an answer.
        content = RecordDict({"refusal": ConfigRecord({"reason": reason})})
        notice = Message(
            content=content, dst_node_id=node, message_type=Purpose.REFUSE.value
        )
        list(self.grid.push_messages([notice]))
