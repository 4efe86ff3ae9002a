"""Replies from a Flower grid as a stream, in the order in which they were asked for."""

import threading
import time
from collections.abc import Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

from knnper.config.errors import RunError

POLL_INTERVAL_S = 0.01


class Interrupted(RunError):
    """The run was told to stop."""


def replies_in_order(
    grid: Grid, messages: Iterable[Message], stop: threading.Event
) -> Iterator[Message]:
    """Send ``messages`` and yield their replies in the order of the messages.

    Messages are made and pushed one at a time. Only the next reply is asked for, since
    a look for all that are missing would take longer the more clients there are; one
    that overtook another stays with the grid.

    Raises
    ------
    Interrupted
        If ``stop`` is set while replies are missing.
    """
    for message_id in [_push(grid, message) for message in messages]:
        while not (replies := list(grid.pull_messages([message_id]))):
            if stop.is_set():
                raise Interrupted("stopped while clients were working")
            time.sleep(POLL_INTERVAL_S)
        yield replies[0]


def _push(grid: Grid, message: Message) -> str:
    pushed = list(grid.push_messages([message]))
    if len(pushed) != 1 or not pushed[0]:
        raise RunError(
            "Flower did not accept a message; the run was stopped or the node is gone"
        )
    return pushed[0]
