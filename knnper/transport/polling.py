"""Replies from a Flower grid as a stream, in the order in which they were asked for."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from knnper.config.errors import RunError

POLL_INTERVAL_S = 0.005
LONGEST_INTERVAL_S = 0.02

MOST_HELD_BACK = 4
LOOKS_FOR_THE_FIRST = 10

MESSAGES_AT_ONCE = 64
"""Requests without a reply at any time, unless there are many workers.

Enough to keep workers busy while Flower looks for new messages, with `flwr run` ten
times a second; few enough that its look through all of them takes no time.
"""


class Interrupted(RunError):
    """The run was told to stop."""


def replies_in_order(
    grid: Grid,
    messages: Iterable[Message],
    stop: threading.Event,
    at_once: int = MESSAGES_AT_ONCE,
) -> Iterator[Message]:
    """Send ``messages`` and yield their replies in the order of the messages.

    A message is made and pushed when fewer than ``at_once`` are not answered, and fewer
    than four times as many wait for an earlier one's reply; so neither side holds more
    than that, however many there are.

    Raises
    ------
    Interrupted
        If ``stop`` is set while replies are missing.
    """
    window = _Window(grid, at_once)
    for message in messages:
        window.push(message)
        while window.is_full():
            yield from window.wait(stop)
    while window.sent:
        yield from window.wait(stop)


class _Window:
    """Messages that were sent and whose replies were not handed on yet.

    Parameters
    ----------
    grid
        Where they were sent.
    at_once
        How many may be without a reply.
    """

    def __init__(self, grid: Grid, at_once: int) -> None:
        self.sent: deque[str] = deque()
        self._grid = grid
        self._at_once = at_once
        self._replies: dict[str, Message] = {}

    def push(self, message: Message) -> None:
        self.sent.append(_push(self._grid, message))

    def is_full(self) -> bool:
        num_missing = len(self.sent) - len(self._replies)
        return (
            num_missing >= self._at_once
            or len(self.sent) >= MOST_HELD_BACK * self._at_once
        )

    def wait(self, stop: threading.Event) -> Iterator[Message]:
        """Wait for replies, and yield those whose turn it is: perhaps none.

        Only the first is asked for, as a rule: a look for all takes longer the more
        there are. Those that overtook it are fetched now and then.
        """
        for look in range(1, LOOKS_FOR_THE_FIRST + 1):
            self._fetch([self.sent[0]])
            if self.sent[0] in self._replies:
                break
            if stop.is_set():
                raise Interrupted("stopped while clients were working")
            # Less and less often, since a look takes time from those who work.
            time.sleep(min(look * POLL_INTERVAL_S, LONGEST_INTERVAL_S))
        else:
            self._fetch([sent for sent in self.sent if sent not in self._replies])
        while self.sent and self.sent[0] in self._replies:
            yield self._replies.pop(self.sent.popleft())

    def _fetch(self, message_ids: list[str]) -> None:
        for reply in self._grid.pull_messages(message_ids):
            self._replies[reply.metadata.reply_to_message_id] = reply


def _push(grid: Grid, message: Message) -> str:
    pushed = list(grid.push_messages([message]))
    if len(pushed) != 1 or not pushed[0]:
        raise RunError(
            "Flower did not accept a message; the run was stopped or the node is gone"
        )
    return pushed[0]
