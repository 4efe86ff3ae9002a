"""Replies from a Flower grid as a stream, in the order of the requests."""

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from knnper.errors import RunError

POLL_INTERVAL_S = 0.005
LONGEST_INTERVAL_S = 0.02
# Shortest time limit of a reply: its node may have to reconnect.
LEAST_S = 30.0
ROUNDS_KNOWN = 5  # previous rounds with which response times are estimated
OWN_PATIENCE, NEW_NODE_PATIENCE = 3.0, 10.0  # see `Pace`
MOST_HELD_BACK = 4
POLLS_OF_FIRST = 10
WAIT_FRACTION = 0.05
# Flower raises these for a reply with arrays that contradict its description.
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)
# A reply may be this many times as large as its request, or have these bytes.
MOST_TIMES_SENT = 16
LEAST_LIMIT_BYTES = 64 * 1024**2
NOT_ACCEPTED = "Flower did not accept a message"
# Environment variable of a ServerApp on a server of ours: the descriptor of a pipe to
# which it writes the nodes that it has sent messages to, a line each.
ANNOUNCEMENTS_VARIABLE = "KNNPER_ANNOUNCEMENTS"
# Requests without a reply at any time, unless there are many workers: enough to keep
# workers busy while Flower looks for new messages, with `flwr run` ten times a second;
# few enough that its look through all of them takes no time.
MESSAGES_AT_ONCE = 64


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages; return their ids, empty for a message that was not accepted."""
    ids = list(grid.push_messages(messages))
    announce(*(message.metadata.dst_node_id for message in messages))
    return ids


def announce(*nodes: int) -> None:
    """Announce nodes that have messages to the gateway; call it once without any.

    From then on the gateway relies on announcements and does not poll Flower, see
    `knnper.server.link.arrivals`.
    """
    pipe = os.environ.get(ANNOUNCEMENTS_VARIABLE)
    if pipe is None:
        return
    lines = "".join(f"{node}\n" for node in nodes) or "\n"
    # A gateway that is too busy to read asks Flower itself within a minute.
    with contextlib.suppress(OSError, ValueError):
        os.write(int(pipe), lines.encode())


@dataclass
class Pace:
    """Response times of nodes, and the time limits of replies that follow from them.

    A node times out after ``patience`` times the median response time of this round or
    of the last five, whichever is longest, and `LEAST_S` more; never after ``most_s``,
    which alone counts while no median is known. The median of a round is known once
    most of its nodes have replied. So a silent node cannot hold up a round, and a quick
    node cannot make the others late.

    A node may have far more to do than the others. So it has at least `OWN_PATIENCE`
    times its own last response time, or `NEW_NODE_PATIENCE` times as long as the others
    if it has not replied yet. Each silence in a row halves this time.
    """

    most_s: float
    patience: float
    _medians: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS_KNOWN))
    _times: list[float] = field(default_factory=list)
    _num_sent: int = 0
    _own: dict[int, float] = field(default_factory=dict)
    _silences: Counter[int] = field(default_factory=Counter)

    def begin(self) -> None:
        """Begin another round."""
        if self._times:
            self._medians.append(sorted(self._times)[len(self._times) // 2])
        self._times, self._num_sent = [], 0

    def sent(self) -> None:
        """Count a message."""
        self._num_sent += 1

    def failed(self) -> None:
        """Count a failed reply, which is no measure of response times."""
        self._num_sent -= 1

    def answered(self, node: int, seconds: float) -> None:
        """Record the response time of a node."""
        self._times.append(seconds)
        self._own[node] = seconds
        del self._silences[node]

    def given_up(self, node: int) -> None:
        """Record that a node did not reply in time."""
        self._silences[node] += 1

    def timeout_s(self, node: int) -> float:
        """Return the time limit of a node's reply, by the present knowledge."""
        known = [*self._medians, *sorted(self._times)[self._num_sent // 2 :][:1]]
        if not known:
            return self.most_s
        usual = self.patience * max(known)
        from_last_response = (
            OWN_PATIENCE * self._own[node]
            if node in self._own
            else NEW_NODE_PATIENCE * usual
        )
        most = max(usual, from_last_response * 0.5 ** self._silences[node])
        return min(self.most_s, LEAST_S + most)


@dataclass(frozen=True)
class Patience:
    """How long, and how often, a server polls for replies.

    Attributes
    ----------
    polls_of_first
        Polls for the first reply alone, before all replies are polled for.
    may_be_away
        Whether a node may leave, so that a missing reply does not end the run.
    """

    pace: Pace | None = None
    longest_interval_s: float = LONGEST_INTERVAL_S
    polls_of_first: int = POLLS_OF_FIRST
    may_be_away: bool = False


ENDLESS = Patience()


@dataclass(frozen=True)
class NoReply:
    """Stands for a reply that will not come."""

    reason: str


class Interrupted(RunError):
    """The run was asked to stop."""


def replies_in_order(
    grid: Grid,
    messages: Iterable[Message],
    stop: threading.Event,
    at_once: int = MESSAGES_AT_ONCE,
    patience: Patience = ENDLESS,
) -> Iterator[Message | NoReply]:
    """Send ``messages`` and yield their replies in the order of the messages.

    A message is made and pushed while fewer than ``at_once`` are unanswered, and fewer
    than `MOST_HELD_BACK` times as many are unanswered or have a reply that waits for an
    earlier one's. So neither side holds more, however many messages there are.

    A `NoReply` stands for a reply that is late by ``patience``, and, if nodes may be
    away, for a reply that cannot be read or a message that was not accepted. Raises
    `Interrupted` once ``stop`` is set.
    """
    window = Window(grid, at_once, patience)
    for message in messages:
        window.push(message)
        while window.is_full():
            yield from window.wait(stop)
    while window.sent:
        yield from window.wait(stop)


class Window:
    """Messages under way, and the replies that came."""

    def __init__(self, grid: Grid, at_once: int, patience: Patience) -> None:
        self.sent: deque[str] = deque()
        self._grid = grid
        self._at_once = at_once
        self._patience = patience
        self._sent_at: dict[str, float] = {}
        self._latest_reply_at = 0.0
        self._nodes: dict[str, int] = {}
        self._replies: dict[str, Message | NoReply] = {}

    def push(self, message: Message) -> str:
        """Send a message; return its id, or a made-up id if it was not accepted."""
        ids = push(self._grid, [message])
        pushed = (ids[0] or None) if len(ids) == 1 else None  # not accepted
        if pushed is None and not self._patience.may_be_away:
            raise RunError(f"{NOT_ACCEPTED}; the run was stopped or the node is gone")
        name = pushed or f"not accepted {len(self._sent_at)}"
        self.sent.append(name)
        self._sent_at[name] = time.monotonic()
        self._nodes[name] = message.metadata.dst_node_id
        if self._patience.pace is not None:
            self._patience.pace.sent()
        if pushed is None:
            self._record_outcome(name, NoReply(f"{NOT_ACCEPTED}: it has just left"))
        return name

    def is_full(self) -> bool:
        """Return whether replies have to be waited for before more is sent."""
        num_missing = len(self.sent) - len(self._replies)
        return (
            num_missing >= self._at_once
            or len(self.sent) >= MOST_HELD_BACK * self._at_once
        )

    def wait(self, stop: threading.Event) -> Iterator[Message | NoReply]:
        """Wait for replies, and yield those that are next in order: perhaps none.

        Usually only the first is polled, since polling takes longer the more replies
        it is for. Replies that overtook it are fetched now and then.
        """
        for _ in range(self._patience.polls_of_first):
            self._fetch([self.sent[0]])
            if self.sent[0] in self._replies:
                break
            if stop.is_set():
                raise Interrupted("stopped while clients were working")
            # Intervals grow, since polling takes time from the workers, but stay a
            # small fraction of the time that the first reply has taken already. If it
            # is the only one left, its node may have been busy with the previous one.
            began = self._sent_at[self.sent[0]]
            if len(self.sent) == 1:
                began = max(began, self._latest_reply_at)
            waited_s = time.monotonic() - began
            wait_s = max(POLL_INTERVAL_S, waited_s * WAIT_FRACTION)
            time.sleep(min(wait_s, self._patience.longest_interval_s))
        else:
            self._fetch([sent for sent in self.sent if sent not in self._replies])
            self._give_up()
        while self.sent and self.sent[0] in self._replies:
            yield self._replies.pop(self.sent.popleft())

    def take(self) -> list[tuple[str, Message | NoReply]]:
        """Look once for all replies; return those that came, with their messages' ids.

        In the order of the messages, without waiting for one.
        """
        self._fetch([sent for sent in self.sent if sent not in self._replies])
        self._give_up()
        answered = [sent for sent in self.sent if sent in self._replies]
        self.sent = deque(sent for sent in self.sent if sent not in self._replies)
        return [(sent, self._replies.pop(sent)) for sent in answered]

    def _give_up(self) -> None:
        """Store a `NoReply` for each message after its time limit.

        Not with `_record_outcome`: nothing has arrived, and a silent node still counts
        when the round's median waits for the replies of most nodes.
        """
        pace, now = self._patience.pace, time.monotonic()
        if pace is None:
            return
        for sent in self.sent:
            timeout_s = pace.timeout_s(self._nodes[sent])
            if sent not in self._replies and now - self._sent_at[sent] > timeout_s:
                self._replies[sent] = NoReply(f"no answer within {timeout_s:.3g} s")
                pace.given_up(self._nodes[sent])

    def _fetch(self, message_ids: list[str]) -> None:
        unanswered = [
            message_id for message_id in message_ids if message_id not in self._replies
        ]
        if not unanswered:
            return
        try:
            messages = list(self._grid.pull_messages(unanswered))
        except _UNREADABLE as error:
            if not self._patience.may_be_away:
                raise
            # Polled one by one, to find the reply that Flower cannot assemble.
            if len(unanswered) == 1:
                reason = f"the reply cannot be read: {type(error).__name__}: {error}"
                self._record_outcome(unanswered[0], NoReply(reason))
            else:
                for message_id in unanswered:
                    self._fetch([message_id])
            return
        for reply in messages:
            self._record_outcome(reply.metadata.reply_to_message_id, reply)

    def _record_outcome(self, message_id: str, reply: Message | NoReply) -> None:
        """Store a reply, or the reason for none, and adapt the pace of its node."""
        self._replies[message_id] = reply
        self._latest_reply_at = time.monotonic()
        pace = self._patience.pace
        if pace is None:
            return
        if isinstance(reply, NoReply) or reply.has_error():
            pace.failed()
        else:
            seconds = time.monotonic() - self._sent_at[message_id]
            pace.answered(self._nodes[message_id], seconds)
