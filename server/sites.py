"""Real clients: their nodes, which are online, and late clients."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from typing_extensions import override

from knnper.errors import RunError, printable
from knnper.experiment import FederationSettings
from knnper.server.checkpoints import Checkpoint
from knnper.server.federation import LiveFederation, Reply, Request, Step
from knnper.server.flower_federation import FlowerFederation
from knnper.server.link.authorized import Registered
from knnper.server.roster import Member, Roster
from knnper.server.run import Conductor
from knnper.transport.messages import (
    Introduction,
    Job,
    Purpose,
    read_introduction,
    to_content,
)
from knnper.transport.polling import Interrupted, NoReply, Patience, push

# Until a node must introduce itself: it may first have to read all of its data.
TIMEOUT_S = 120.0
ASK_AGAIN_S = 20.0  # until a node that could not take part is asked again
REMIND_S = 300.0  # until the reason is repeated to a node that cannot take part
log = logging.getLogger("flwr")
# How the server waits for replies of clients on other machines.
OVER_NETWORK = Patience(longest_interval_s=0.5, polls_of_first=1, may_be_away=True)
LOOK_EVERY_S = 0.2
REMIND_EVERY_S = 30.0
Enough = Callable[[dict[str, Member]], bool]
LATE_CHECK_EVERY_S = 1.0
TRY_AGAIN_S = 60.0  # until a client that did not get the model is tried again


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
    """The nodes of clients, by the clients' names."""

    grid: Grid
    experiment: str
    # Registered clients by node; empty without authentication.
    roster: Callable[[], Mapping[str, Registered]]
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
        fixed = roster[str(node)].num_train if roster else None
        if fixed is not None and introduction.num_train != fixed:
            warning = "%s reports %d training examples; the operator fixed %d"
            log.warning(warning, title, introduction.num_train, fixed)
        self._members[node] = Member(
            name=introduction.name,
            seen=introduction.train,
            # A client without data does not train, whatever number is fixed.
            num_train=min(introduction.num_train, 1)
            * (fixed or introduction.num_train),
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
        self._refused[node] = reason
        self._remind_at[node] = now + REMIND_S
        log.warning("%s", reason)
        # For the node's own log; no reply is expected.
        content = RecordDict({"refusal": ConfigRecord({"reason": reason})})
        push(self.grid, [Message(content, node, Purpose.REFUSE.value)])


@dataclass
class SiteFederation(LiveFederation):
    """Real clients, which are sent requests by name while they are online."""

    directory: Directory
    messenger: FlowerFederation
    settings: FederationSettings
    stop: threading.Event = field(default_factory=threading.Event)
    may_be_away: bool = True
    trusts_clients: bool = False
    _missing_since: dict[str, float] = field(default_factory=dict)
    _could_not_begin: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.round_attempts = self.settings.round_attempts

    @override
    def exchange(self, step: Step, requests: Iterable[Request]) -> Iterator[Reply]:
        """Offline clients come last, as failures."""
        self.directory.refresh()
        away: list[str] = []

        def reachable() -> Iterator[Request]:
            for request in requests:
                for number, client in enumerate(request.clients):
                    if self.directory.node_of(client) is None:
                        away.append(client)
                        continue
                    state_round = request.state_rounds[number : number + 1]
                    yield replace(request, clients=(client,), state_rounds=state_round)

        yield from self.messenger.exchange(step, reachable())
        for client in away:
            yield Reply((client,), None, "it is not connected")

    @override
    def is_available(self, client: str) -> bool:
        """Return whether a client was online at the last `Directory.refresh`."""
        return self.directory.node_of(client) is not None

    @override
    def begin(self, step: Step, request: Request) -> None:
        if self.is_available(request.client):
            self.messenger.begin(step, request)
        else:
            self._could_not_begin.append(
                Reply(request.clients, None, "it is not connected")
            )

    @override
    def answered(self) -> Sequence[Reply]:
        """Also updates the directory."""
        self.directory.refresh()
        failed, self._could_not_begin = self._could_not_begin, []
        return [*failed, *self.messenger.answered()]

    @override
    def require_client(self, clients: Sequence[str], waited_s: float) -> None:
        most_s = self.settings.wait_for_clients_s
        if waited_s > most_s:
            raise RunError(
                f"waited {most_s:g} s for one of {len(clients)} clients, found none. "
                "Find out why they are offline, and resume the run; "
                "run.federation.wait_for_clients_s is how long a run waits"
            )

    @override
    def await_clients(self, clients: Sequence[str], least: int) -> None:
        """Also waits for clients that have just disconnected, or are busy."""

        def enough(members: dict[str, Member]) -> bool:
            return sum(client in members for client in clients) >= least

        def all_expected(members: dict[str, Member]) -> bool:
            missing = [client for client in clients if client not in members]
            # A list, since each call notes since when a client is missing.
            hopeless = [not self._is_worth_waiting(client) for client in missing]
            return enough(members) and all(hopeless)

        self.directory.refresh()
        for client in self.directory.members():  # they have returned
            self._missing_since.pop(client, None)
        whom = f"{least} of {', '.join(clients)}"
        members = self._wait_until(all_expected, whom)
        if not enough(members):
            connected = sorted(set(clients) & set(members))
            raise RunError(
                f"waited {self.settings.wait_for_clients_s:g} s for {least} of "
                f"{len(clients)} clients, found {len(connected)} "
                f"({', '.join(connected) or 'none'}). Find out why the others are "
                "offline, and resume the run; run.federation.wait_for_clients_s is how "
                "long a run waits, run.max_failed_fraction how many clients a round "
                "can do without"
            )

    def gather(self) -> list[Member]:
        """Wait for enough clients to begin a run, and return them."""
        least = self.settings.min_clients
        expected = self.directory.registered()

        def enough(members: dict[str, Member]) -> bool:
            if least is not None:
                return len(members) >= least
            return bool(members) and expected <= set(members)

        whom = f"{least} clients" if least else ", ".join(sorted(expected)) or "any"
        members = self._wait_until(enough, whom)
        if len(members) < (least or 1):
            names = ", ".join(sorted(members)) or "none"
            refused = "".join(f"\n  - {reason}" for reason in self.directory.refused())
            raise RunError(
                f"expected at least {least or 1} clients within "
                f"{self.settings.wait_for_clients_s:g} s, found {len(members)} "
                f"({names}). Start more, or set run.federation.min_clients{refused}"
            )
        return list(members.values())

    def _is_worth_waiting(self, client: str) -> bool:
        """Return whether a missing client may connect soon."""
        now = time.monotonic()
        waited_s = now - self._missing_since.setdefault(client, now)
        if self.directory.is_silent(client):
            return waited_s < self.settings.wait_for_clients_s
        return waited_s < self.settings.grace_s

    def _wait_until(self, enough: Enough, whom: str) -> dict[str, Member]:
        """Return the connected clients once they are enough, or the time is over."""
        began = time.monotonic()
        remind_at = began
        while True:
            self.directory.refresh()
            members = self.directory.members()
            now = time.monotonic()
            too_long = now - began > self.settings.wait_for_clients_s
            if enough(members) or too_long:
                return members
            if now >= remind_at:
                log.info(
                    "waiting for %s; online: %s", whom, ", ".join(members) or "none"
                )
                remind_at = now + REMIND_EVERY_S
            if self.stop.wait(LOOK_EVERY_S):
                raise Interrupted("stopped while waiting for clients")


@dataclass
class LateClients:
    """Distributes a trained model to clients that come late."""

    conductor: Conductor
    federation: SiteFederation
    trained: Checkpoint
    _try_at: dict[str, float] = field(default_factory=dict)

    def serve(self, roster: Roster, seconds: float) -> None:
        """Distribute the model for ``seconds`` to clients that do not have it."""
        until = time.monotonic() + seconds
        if seconds:
            log.info("staying for %.0f s, for clients that come late", seconds)
        while time.monotonic() < until and not self.federation.stop.is_set():
            roster = self._distribute_to_connected(roster)
            self.federation.stop.wait(LATE_CHECK_EVERY_S)

    def _distribute_to_connected(self, roster: Roster) -> Roster:
        waiting = self._waiting()
        if not waiting:
            return roster
        log.info("sending the model to %s", ", ".join(sorted(waiting)))
        joined = self._joined(roster, list(waiting.values()))
        served = self.conductor.distribute(self.trained, joined, to=waiting)
        retry_at = time.monotonic() + TRY_AGAIN_S
        self._try_at.update(dict.fromkeys(set(waiting) - set(served), retry_at))
        return joined

    def _waiting(self) -> dict[str, Member]:
        self.federation.directory.refresh()
        done = self.conductor.folder.distributed.reported(self.trained.fingerprint)
        now = time.monotonic()
        return {
            name: member
            for name, member in self.federation.directory.members().items()
            if name not in done and self._try_at.get(name, now) <= now
        }

    def _joined(self, roster: Roster, members: list[Member]) -> Roster:
        known = set(roster.names())
        new = [
            replace(member, seen=False)
            for member in members
            if member.name not in known
        ]
        if not new:
            return roster
        joined = Roster.of([*roster.members, *new], roster.split)
        self.conductor.folder.write_roster(joined)
        return joined
