"""Replies from a Flower grid as a stream, in the order in which they were asked for."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from knnper.config.errors import RunError

POLL_INTERVAL_S = 0.005

MESSAGES_AT_ONCE = 64
"""Requests without a reply at any time, unless there are many workers.

Enough to keep workers busy while Flower looks for new messages, which it does ten
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

    A message is made and pushed when fewer than ``at_once`` have no reply that was
    yielded; so neither side holds more than that, however many there are. Only the next
    reply is asked for, since a look for all that are missing would take longer the more
    there are; one that overtook another stays with the grid.

    Raises
    ------
    Interrupted
        If ``stop`` is set while replies are missing.
    """
    waiting: deque[str] = deque()
    for message in messages:
        waiting.append(_push(grid, message))
        if len(waiting) >= at_once:
            yield _reply(grid, waiting.popleft(), stop)
    while waiting:
        yield _reply(grid, waiting.popleft(), stop)


def _reply(grid: Grid, message_id: str, stop: threading.Event) -> Message:
    while not (replies := list(grid.pull_messages([message_id]))):
        if stop.is_set():
            raise Interrupted("stopped while clients were working")
        time.sleep(POLL_INTERVAL_S)
    return replies[0]


def _push(grid: Grid, message: Message) -> str:
    pushed = list(grid.push_messages([message]))
    if len(pushed) != 1 or not pushed[0]:
        raise RunError(
            "Flower did not accept a message; the run was stopped or the node is gone"
        )
    return pushed[0]
